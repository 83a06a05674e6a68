"""Five faults that made other systems answer with text computed from the wrong pages, asked of live workers over gRPC.

A block outside what was granted or computed, a reference used twice, one used after its pages serve others, made-up
parameters, and another request's reference. Each must end with a typed error and without one token.
"""

import secrets
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import pytest

from kvferry.cache.errors import ConfigError, DeadlineExceeded, KVError, PeerLost, TransferError, TransferTimeout
from kvferry.cache.page_table import BlockLists
from kvferry.transfer.engines.models import load_model
from kvferry.transfer.engines.oracle import generate_in_one_process
from kvferry.transfer.inference import DecodeCall, GenerateCall, PrefillReply
from kvferry.transfer.types import (
    AuxRecord,
    Grant,
    Permit,
    PromptId,
    ResultStatus,
    TransferKey,
    TransferResult,
    Usage,
    WireReport,
    WorkerId,
)
from tests.end_to_end import direct
from tests.end_to_end.direct import Reply
from tests.end_to_end.rogue import Rogue, joined
from tests.end_to_end.serving import CHUNK_TOKENS, Service, call_for, prompt_of, serving, wait_paired
from tests.helpers import wait_until

MODEL = "tiny-gpt-oss"
PROMPT_TOKENS, NEW_TOKENS = 200, 12
TOKENS_PER_BLOCK = 32
REFUSED_SECONDS = 10.0
IDLE_SECONDS = 10.0

# 200 slots: a few prompts of FILLING_TOKENS go through all of them.
SETTINGS = {"model": MODEL, "pools": {"quota_bytes": 200 * 24576}, "max_seq_len_tokens": 2048}
FILLING_TOKENS, NUM_FILLING = 1500, 5

pytestmark = pytest.mark.xdist_group("replays")


@dataclass(frozen=True)
class Field:
    """A prefill worker, and decode workers of both directions.

    Attributes:
        decode: the decode worker of this test; `other` is the one with the other direction.
    """

    service: Service
    decode: str

    @property
    def other(self) -> str:
        return next(name for name in DECODE_WORKERS if name != self.decode)

    def compute(self, call: GenerateCall) -> PrefillReply:
        return direct.prefill(self.service, "prefill-0", call)

    def decoded(self, call: DecodeCall, worker: str = "") -> Reply:
        return direct.decode(self.service, worker or self.decode, call)

    def holding(self) -> int:
        return direct.status(self.service, "prefill-0").holding

    def fill_pools(self) -> None:
        """Have every page of the prefill worker and of this decode worker used by other prompts."""
        for seed in range(NUM_FILLING):
            call = fresh_call(FILLING_TOKENS, seed)
            one_token = replace(call, sampling=replace(call.sampling, max_new_tokens=1))
            assert self.decoded(direct.decode_call(one_token, self.compute(one_token))).error is None

    def check_well(self, *open_keys: TransferKey) -> None:
        """After taking back what is still offered nothing is in use, and a request is answered as by one process."""
        for key in open_keys:
            direct.cancel(self.service, "prefill-0", key)
        wait_until(self.service.is_idle, IDLE_SECONDS, "every page came back")
        call = fresh_call()
        reply = self.decoded(direct.decode_call(call, self.compute(call)))
        assert (reply.error, reply.tokens) == (None, expected_tokens(call))
        wait_until(self.service.is_idle, IDLE_SECONDS, "every page came back")


DECODE_WORKERS = ("decode-0", "decode-pull")


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    with serving(wait=False, **SETTINGS) as service:
        name = DECODE_WORKERS[1]
        settings = {**SETTINGS, "name": name, "role": "decode", "directory": service.endpoint}
        child = service.cluster.start("worker", name, {**settings, "transfer": {"direction": "pull"}})
        service.cluster.wait_endpoint(child, 90.0)
        wait_paired(service)
        yield service


@pytest.fixture(params=DECODE_WORKERS)
def field(service: Service, request: pytest.FixtureRequest) -> Field:
    return Field(service, request.param)


@pytest.fixture(scope="module")
def rogue(service: Service) -> Iterator[Rogue]:
    with joined(service, SETTINGS) as rogue:
        yield rogue


def fresh_call(num_tokens: int = PROMPT_TOKENS, seed: int = 0, timeout_seconds: float = 60.0) -> GenerateCall:
    """A prompt that no worker has any page of."""
    request_id = f"request-{uuid.uuid4().hex}"
    call = call_for(prompt_of(num_tokens, seed), NEW_TOKENS, salt=request_id)
    return replace(call, request_id=request_id, timeout_seconds=timeout_seconds)


def expected_tokens(call: GenerateCall) -> tuple[int, ...]:
    assert call.prompt_token_ids is not None
    return generate_in_one_process(load_model(MODEL), call.prompt_token_ids, call.sampling, CHUNK_TOKENS).token_ids


def check_refused(reply: Reply, kind: type[KVError], words: str) -> None:
    assert reply.events == []
    assert type(reply.error) is kind, reply.error
    assert words in str(reply.error)
    assert reply.seconds < REFUSED_SECONDS


# ---- blocks out of range


@pytest.mark.parametrize(
    "num_tokens",
    [
        PROMPT_TOKENS + 2 * TOKENS_PER_BLOCK,
        PROMPT_TOKENS - TOKENS_PER_BLOCK,
        PROMPT_TOKENS + 1,
        PROMPT_TOKENS - 1,
        1,
    ],
)
def test_decode_of_another_length_than_computed_is_refused(field: Field, num_tokens: int) -> None:
    call = fresh_call()
    computed = field.compute(call)
    assert call.prompt_token_ids is not None
    prompt = (call.prompt_token_ids * 2)[:num_tokens]
    reply = field.decoded(direct.decode_call(call, computed, prompt_token_ids=prompt))
    check_refused(reply, TransferError, f"of {num_tokens} tokens, computed was")
    field.check_well()


Bend = Callable[[Rogue, BlockLists], BlockLists]


def _with(pages: BlockLists, index: int, slot: int) -> BlockLists:
    """Another slot for one block of the last layer group."""
    slots, epochs = [group.copy() for group in pages.slots], [group.copy() for group in pages.epochs]
    slots[-1][index], epochs[-1][index] = slot, 0
    return BlockLists(tuple(slots), tuple(epochs))


def _resized(pages: BlockLists, change: int) -> BlockLists:
    length = len(pages.slots[0]) + change
    return BlockLists(
        tuple(np.resize(slots, length) for slots in pages.slots),
        tuple(np.resize(epochs, length) for epochs in pages.epochs),
    )


BENDS: dict[str, tuple[Bend, str]] = {
    "one slot past the pools": (lambda rogue, pages: _with(pages, 2, rogue.num_slots), "slots"),
    "a slot far away": (lambda rogue, pages: _with(pages, 2, 2**31 - 1), "slots"),
    "a slot twice": (lambda rogue, pages: _with(pages, 2, int(pages.slots[0][0])), "named twice"),
    "a block too few": (lambda rogue, pages: _resized(pages, -1), "entries"),
    "a block too many": (lambda rogue, pages: _resized(pages, 1), "entries"),
    "a block out of the window": (lambda rogue, pages: pages, "no page for blocks"),
}


@pytest.mark.parametrize("bend", BENDS)
def test_grant_of_blocks_out_of_range_moves_nothing_and_ends_the_attempt(
    service: Service, rogue: Rogue, bend: str
) -> None:
    field = Field(service, "decode-0")
    call = fresh_call()
    computed = field.compute(call)
    change, words = BENDS[bend]
    pages = change(rogue, rogue.pages(-(-PROMPT_TOKENS // TOKENS_PER_BLOCK)))
    rogue.say(computed.sender, grant_of(rogue, call, computed, pages))
    result = rogue.wait_result()
    assert (result.status, result.quiet, result.wire.num_bytes) == (ResultStatus.FAILED, True, 0)
    assert result.failure is not None
    assert result.failure.code == "bad_grant"
    assert words in result.failure.message
    # Whoever the attempt was meant for gets nothing from it either.
    check_refused(field.decoded(direct.decode_call(call, computed)), TransferError, "bad_grant")
    field.check_well()


def grant_of(rogue: Rogue, call: GenerateCall, computed: PrefillReply, pages: BlockLists) -> Grant:
    prompt = PromptId.of(computed.prompt_token_ids)
    return Grant(computed.key, computed.sender, rogue.worker, prompt, pages, 5.0, request_id=call.request_id)


# ---- a reference used twice


def test_reference_used_again_after_success_is_refused_everywhere(field: Field) -> None:
    call = fresh_call()
    again = direct.decode_call(call, field.compute(call))
    assert field.decoded(again).tokens == expected_tokens(call)
    check_refused(field.decoded(again), TransferError, "was received here already")
    check_refused(field.decoded(again, field.other), TransferError, "was served already")
    field.check_well()


@pytest.mark.parametrize("same_worker", [True, False])
def test_reference_used_twice_at_once_answers_once(field: Field, same_worker: bool) -> None:
    call = fresh_call()
    twice = direct.decode_call(call, field.compute(call))
    names = [field.decode, field.decode if same_worker else field.other]
    replies = direct.decode_everywhere(field.service, [(name, twice) for name in names])
    answered = [reply for reply in replies if reply.error is None]
    refused = [reply for reply in replies if reply.error is not None]
    assert [reply.tokens for reply in answered] == [expected_tokens(call)]
    assert [reply.events for reply in refused] == [[]]
    # At one worker the second is refused while the first runs, or after it; at another one by the prefill worker.
    words = "here already" if same_worker else "served already"
    assert isinstance(refused[0].error, ConfigError | TransferError)
    assert words in str(refused[0].error)
    field.check_well()


# ---- a reference whose pages serve others by now


def test_reference_whose_offer_expired_and_whose_pages_are_reused_is_refused(field: Field) -> None:
    call = fresh_call(timeout_seconds=3.0)
    stale = direct.decode_call(call, field.compute(call), timeout_seconds=20.0)
    wait_until(lambda: field.holding() == 0, 10.0, "the offer expired")
    field.fill_pools()
    check_refused(field.decoded(stale), TransferTimeout, "no grant came in time")
    check_refused(field.decoded(stale, field.other), TransferTimeout, "no grant came in time")
    field.check_well()


def test_reference_that_was_served_and_whose_pages_are_reused_is_refused(field: Field) -> None:
    call = fresh_call()
    stale = direct.decode_call(call, field.compute(call))
    assert field.decoded(stale).tokens == expected_tokens(call)
    field.fill_pools()
    check_refused(field.decoded(stale), TransferError, "was received here already")
    check_refused(field.decoded(stale, field.other), TransferError, "was served already")
    field.check_well()


# ---- made-up parameters


def _other_life(worker: WorkerId) -> WorkerId:
    return replace(worker, incarnation=worker.incarnation ^ 1)


MADE_UP: dict[str, tuple[Callable[[PrefillReply], dict[str, object]], type[KVError], str]] = {
    "key": (lambda computed: {"key": TransferKey(secrets.token_hex(16), 1)}, TransferError, "is unknown here"),
    "attempt": (lambda computed: {"key": replace(computed.key, attempt=2)}, TransferError, "is unknown here"),
    "incarnation": (lambda computed: {"sender": _other_life(computed.sender)}, PeerLost, "is not a paired peer"),
    "sender": (lambda computed: {"sender": WorkerId("nobody", 7)}, PeerLost, "is not a paired peer"),
}


@pytest.mark.parametrize("what", MADE_UP)
def test_made_up_parameter_is_refused(field: Field, what: str) -> None:
    call = fresh_call()
    computed = field.compute(call)
    change, kind, words = MADE_UP[what]
    check_refused(field.decoded(direct.decode_call(call, computed, **change(computed))), kind, words)
    # The pages of the real attempt are still there for whoever names all of it.
    assert field.decoded(direct.decode_call(call, computed), field.other).tokens == expected_tokens(call)
    field.check_well()


def test_made_up_key_of_a_prompt_yet_to_come_waits_no_longer_than_its_deadline(field: Field) -> None:
    call = fresh_call()
    computed = field.compute(call)
    key = TransferKey(secrets.token_hex(16), 1)
    reply = field.decoded(direct.decode_call(call, computed, key=key, early=True, timeout_seconds=2.0))
    assert reply.events == []
    assert isinstance(reply.error, DeadlineExceeded | TransferTimeout)
    assert reply.seconds < REFUSED_SECONDS
    field.check_well(computed.key)


Claim = Callable[[TransferResult], TransferResult]


def _claims(**wire: int) -> Claim:
    return lambda result: replace(result, wire=replace(result.wire, **wire))


def _aux(tokens: tuple[int, ...]) -> AuxRecord:
    return AuxRecord(tokens, (0.0,) * len(tokens), Usage(PROMPT_TOKENS))


CLAIMS: dict[str, tuple[Claim, str]] = {
    "another grant": (lambda result: replace(result, fence=result.fence ^ 1), "about other slots"),
    "no pages": (_claims(num_slices=0, num_pages=0), "result accounts for 0 pages"),
    "a page too many": (lambda result: _claims(num_pages=result.wire.num_pages + 1)(result), "result accounts for"),
    "two first tokens": (lambda result: replace(result, aux=_aux((5, 6))), "exactly one first token"),
    "another prompt": (
        lambda result: replace(result, aux=AuxRecord((5,), (0.0,), Usage(PROMPT_TOKENS + 1))),
        "result is for 201 prompt tokens",
    ),
}


def claim_of(grant: Grant, rogue: WorkerId) -> TransferResult:
    """All went well, says a sender that wrote nothing."""
    wire = WireReport(num_slices=1, num_pages=grant.pages.num_pages, num_bytes=1 << 20, lane="cma")
    return TransferResult(
        grant.key, rogue, grant.receiver, ResultStatus.OK, grant.fence, quiet=True, wire=wire, aux=_aux((5,))
    )


def call_of_rogue(rogue: Rogue, timeout_seconds: float) -> DecodeCall:
    call = fresh_call()
    assert call.prompt_token_ids is not None
    key = TransferKey(secrets.token_hex(16), 1)
    return DecodeCall(
        call.request_id, key, rogue.worker, call.prompt_token_ids, call.sampling, timeout_seconds, call.cache_salt
    )


@pytest.mark.parametrize("claim", CLAIMS)
def test_made_up_result_of_a_registered_sender_is_refused(service: Service, rogue: Rogue, claim: str) -> None:
    field = Field(service, "decode-0")
    change, words = CLAIMS[claim]
    rogue.answer = lambda grant: change(claim_of(grant, rogue.worker))
    check_refused(field.decoded(call_of_rogue(rogue, 20.0)), TransferError, words)
    field.check_well()


PERMITS: dict[str, tuple[Callable[[Permit, Rogue], Permit], str]] = {
    "another grant": (lambda permit, rogue: replace(permit, fence=permit.fence ^ 1), "about other slots"),
    "outside the pools": (lambda permit, rogue: replace(permit, pages=_moved(permit.pages, rogue.num_slots)), "slots"),
    "other blocks": (lambda permit, rogue: replace(permit, pages=_with(permit.pages, -1, -1)), "different blocks"),
    "too few blocks": (lambda permit, rogue: replace(permit, pages=_resized(permit.pages, -1)), "entries"),
}


def _moved(pages: BlockLists, by: int) -> BlockLists:
    return BlockLists(tuple(np.where(slots >= 0, slots + by, slots) for slots in pages.slots), pages.epochs)


@pytest.mark.parametrize("permit", PERMITS)
def test_made_up_permit_of_a_registered_sender_is_refused(service: Service, rogue: Rogue, permit: str) -> None:
    field = Field(service, "decode-pull")
    change, words = PERMITS[permit]
    rogue.answer = lambda grant: change(
        Permit(grant.key, rogue.worker, grant.receiver, grant.fence, grant.pages, 5.0), rogue
    )
    check_refused(field.decoded(call_of_rogue(rogue, 20.0)), TransferError, words)
    field.check_well()


def test_result_without_any_data_never_completes_a_request(field: Field, rogue: Rogue) -> None:
    rogue.answer = lambda grant: claim_of(grant, rogue.worker)
    reply = field.decoded(call_of_rogue(rogue, 3.0))
    assert reply.events == []
    assert isinstance(reply.error, TransferError | DeadlineExceeded)
    assert reply.seconds < REFUSED_SECONDS
    field.check_well()


# ---- another request's reference


def test_reference_of_another_request_with_a_prompt_of_the_same_length_is_refused(field: Field) -> None:
    theirs, ours = fresh_call(seed=1), fresh_call(seed=2)
    their_prompt, our_prompt = field.compute(theirs), field.compute(ours)
    stolen = direct.decode_call(ours, our_prompt, key=their_prompt.key)
    check_refused(field.decoded(stolen), TransferError, "grant is for prompt")
    # Ours is not concerned; theirs was spent by the one who named it, and is not served a second time.
    assert field.decoded(direct.decode_call(ours, our_prompt)).tokens == expected_tokens(ours)
    check_refused(field.decoded(direct.decode_call(theirs, their_prompt), field.other), TransferError, "bad_grant")
    field.check_well()


def test_reference_under_another_request_id_is_refused(field: Field) -> None:
    call = fresh_call()
    computed = field.compute(call)
    foreign = direct.decode_call(call, computed, request_id=fresh_call().request_id)
    check_refused(field.decoded(foreign), TransferError, "grant is for request")
    check_refused(field.decoded(direct.decode_call(call, computed)), TransferError, "bad_grant")
    field.check_well()


def test_reference_under_another_request_id_is_refused_where_the_prompt_is_cached(field: Field) -> None:
    """Nothing would have to move, so nothing would be wrong with the text; it is refused all the same."""
    first = fresh_call()
    assert field.decoded(direct.decode_call(first, field.compute(first))).error is None
    call = replace(first, request_id=f"{first.request_id}-again")
    foreign = direct.decode_call(call, field.compute(call), request_id="another")
    check_refused(field.decoded(foreign), TransferError, "grant is for request")
    field.check_well()
