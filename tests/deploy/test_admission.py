"""When a request gets its pages, without a loop or an engine: the clock is the test's."""

import pytest

from kvferry.cache.admission import PoolOptions
from kvferry.cache.errors import CapacityError
from kvferry.cache.manager import KVCacheManager
from kvferry.cache.sequence import SequenceState
from kvferry.deploy.admission import Admission
from kvferry.deploy.requests import Request
from kvferry.transfer.inference import DecodeCall, SamplingParams
from kvferry.transfer.types import TransferKey, WorkerId
from tests.cache.specs import spec
from tests.deploy.loops import Sink, counting_prompt, make_manager

CHUNK_TOKENS = 16
PATIENCE_SECONDS = 10.0


class World:
    """A manager, its admission, and pages that may never come back."""

    def __init__(self, num_slots: int = 64, options: PoolOptions = PoolOptions()) -> None:  # noqa: B008 - immutable
        self.manager: KVCacheManager = make_manager(spec([8, None, 8, None]), "V2", num_slots, 4, options)
        self.lost = [0]
        self.admission = Admission(self.manager, CHUNK_TOKENS, PATIENCE_SECONDS, lambda: self.lost)

    def promised(self) -> int:
        return self.manager.usage()[0].reserved


def request_of(prompt_tokens: int, new_tokens: int = 4, *, kind: str = "alone", salt: str = "") -> Request:
    prompt, sampling = counting_prompt(prompt_tokens), SamplingParams(max_new_tokens=new_tokens)
    sender = WorkerId("p", 1)
    decode = DecodeCall("r", TransferKey("0" * 32, 1), sender, prompt, sampling, 1.0) if kind == "decode" else None
    return Request(
        "r", prompt, sampling, Sink(), 0.0, 100.0, hand_over=kind == "hand over", decode=decode, cache_salt=salt
    )


@pytest.mark.parametrize(
    "kind, promised",
    [
        # 40 prompt tokens and 23 of the 24 new ones are 16 blocks; the window of 8 and a chunk of 16 straddle 7.
        ("alone", 16 + 7),
        ("hand over", 10 + 7),
        # Decoding, the window of 8 and one token straddle 3.
        ("decode", 16 + 3),
    ],
)
def test_promise_is_the_most_the_request_can_hold(kind: str, promised: int) -> None:
    world, request = World(), request_of(40, 24, kind=kind)
    assert world.admission.admit(request, 5.0)
    assert world.promised() == promised
    assert request.sequence is not None
    assert request.sequence.state is SequenceState.ACTIVE
    assert request.started_at == 5.0


def test_scratch_pages_make_the_promise_smaller() -> None:
    promised = []
    for options in (PoolOptions(), PoolOptions(window_scratch=True)):
        world, request = World(100, options), request_of(200, 1)
        admission = Admission(world.manager, 128, PATIENCE_SECONDS, lambda: [0])
        assert admission.admit(request, 0.0)
        promised.append(world.promised())
    # 50 blocks of full attention; a window of 8 and a chunk of 128 straddle 35, of which scratch pages leave few.
    assert promised[0] == 50 + 35
    assert 50 < promised[1] < promised[0]


def test_request_larger_than_empty_pools_is_refused_for_good() -> None:
    world = World(20)
    with pytest.raises(CapacityError, match=r"needs \[33\] slots per pool group, the pools have \[20\]") as refused:
        world.admission.check_fits_ever(request_of(98, 4))
    assert refused.value.permanent
    world.admission.check_fits_ever(request_of(40, 4))
    with pytest.raises(CapacityError) as refused:
        world.admission.admit(request_of(98, 4), 0.0)
    assert refused.value.permanent
    assert world.promised() == 0


def test_request_waits_for_a_release_and_leaves_no_trace_meanwhile() -> None:
    world, first, second = World(40), request_of(60, 4), request_of(60, 4)
    assert world.admission.admit(first, 0.0)
    promised = world.promised()
    assert not world.admission.admit(second, 0.0)
    assert second.sequence is None
    assert world.promised() == promised
    assert first.sequence is not None
    first.sequence.close()
    assert world.admission.admit(second, 1.0)
    world.manager.check_integrity()


def test_request_that_is_not_resumed_leaves_no_trace() -> None:
    world = World(64, PoolOptions(max_util_for_resume=0.2))
    other = world.manager.create_sequence("other")
    other.resume()
    other.resize(capacity=40)
    request = request_of(8, 1)
    assert not world.admission.admit(request, 0.0)
    assert request.sequence is None
    assert world.manager.sequences == {other}
    assert world.promised() == 0
    other.close()
    assert world.admission.admit(request, 0.0)


def publish(world: World, num_tokens: int, salt: str = "") -> None:
    request = request_of(num_tokens, 1, salt=salt)
    assert world.admission.admit(request, 0.0)
    sequence = request.sequence
    assert sequence is not None
    sequence.resize(capacity=num_tokens)
    sequence.commit(request.tokens[sequence.committed :])
    sequence.close()


@pytest.mark.parametrize("kind, reused", [("alone", 29), ("hand over", 29), ("decode", 28)])
def test_all_but_the_last_token_may_be_reused(kind: str, reused: int) -> None:
    """Its logits are needed; and whole blocks only where the rest is received."""
    world, request = World(), request_of(30, 4, kind=kind)
    publish(world, 30)
    assert world.admission.admit(request, 0.0)
    assert request.reused_tokens == reused


def test_other_salt_reuses_nothing() -> None:
    world = World()
    publish(world, 30, salt="one")
    requests = [request_of(30, salt=salt) for salt in ("", "two", "one")]
    for request in requests:
        assert world.admission.admit(request, 0.0)
    assert [request.reused_tokens for request in requests] == [0, 0, 29]


# ---- waiting for nothing


def stuck(options: PoolOptions = PoolOptions()) -> tuple[World, Request]:  # noqa: B008 - immutable
    """Pages of a sequence that nothing gives back, and a request that does not fit beside it."""
    world, request = World(34, options), request_of(20, 4)
    other = world.manager.create_sequence("other")
    other.resume()
    other.resize(capacity=60)
    assert not world.admission.admit(request, 0.0)
    return world, request


def test_stall_is_reported_after_the_patience_with_the_numbers() -> None:
    world, request = stuck()
    assert world.admission.stalled([request], 100.0, busy=False) is None
    assert world.admission.stalled([request], 109.9, busy=False) is None
    error = world.admission.stalled([request], 110.0, busy=False)
    assert isinstance(error, CapacityError)
    assert "request r has waited 10.0 s and nothing moves: it needs [12] slots" in str(error)
    assert (error.requested, error.available) == ((12,), (4,))
    assert not error.permanent
    forbidden = world.admission.stalled([request], 111.0, busy=False, forbidden="the pools are on fire")
    assert "nothing moves: the pools are on fire; nothing under way will change that" in str(forbidden)


@pytest.mark.parametrize("change", ["busy", "nobody waits", "pages move"])
def test_patience_begins_again_whenever_something_moves(change: str) -> None:
    world, request = stuck()
    assert world.admission.stalled([request], 100.0, busy=False) is None
    if change == "pages move":
        next(iter(world.manager.sequences)).resize(capacity=64)
    waiting = [] if change == "nobody waits" else [request]
    assert world.admission.stalled(waiting, 109.0, busy=change == "busy") is None
    assert world.admission.stalled([request], 112.0, busy=False) is None
    assert world.admission.stalled([request], 123.0, busy=False) is not None


def test_stall_of_a_request_that_is_never_resumed_names_the_gate() -> None:
    world = World(64, PoolOptions(max_util_for_resume=0.2))
    other = world.manager.create_sequence("other")
    other.resume()
    other.resize(capacity=40)
    request = request_of(8, 1)
    assert not world.admission.admit(request, 0.0)
    assert world.admission.stalled([request], 0.0, busy=False) is None
    assert "max_util_for_resume" in str(world.admission.stalled([request], PATIENCE_SECONDS, busy=False))


def test_request_that_never_fits_beside_quarantine_is_refused_until_proof_comes() -> None:
    world, request = stuck()
    world.lost = [22]
    assert not world.admission.admit(request, 0.0)
    world.lost = [23]
    with pytest.raises(CapacityError, match=r"\[11\] are left beside \[23\] in quarantine") as refused:
        world.admission.admit(request, 0.0)
    assert not refused.value.permanent
