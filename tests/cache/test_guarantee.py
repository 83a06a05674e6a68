"""A request that was promised its slots never fails for want of pages, whatever others share, hold or publish."""

import random
from collections.abc import Callable
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.cache.admission import CommitPolicy, PoolOptions
from kvferry.cache.holds import Access, Hold
from kvferry.cache.layout import build_layout, build_static_layout
from kvferry.cache.manager import KVCacheManager
from kvferry.cache.reservation import reserved_slots
from kvferry.cache.sequence import SequenceCache
from kvferry.cache.spec import LayerSpec
from kvferry.cache.static_manager import StaticKVCacheManager
from tests.cache.specs import attention, layout, model, recurrent

CHUNK = 7
LONGEST = 40

SHAPES: dict[str, tuple[LayerSpec, ...]] = {
    "full": (attention(),),
    "windows": (attention(5), attention(9), attention()),
    "windows only": (attention(6), attention(11, heads=1)),
    "sinks": (attention(6, sink_tokens=5), attention()),
    "recurrent": (recurrent(3), attention(), attention(9)),
    "recurrent only": (recurrent(3),),
}


@dataclass
class Running:
    """A request on its way: prompt chunk by chunk, then token by token."""

    sequence: SequenceCache
    tokens: list[int]
    prompt: int

    def step(self) -> bool:
        """Compute on. False: it is over."""
        sequence = self.sequence
        at = sequence.history
        if at == len(self.tokens):
            return False
        end = min(at + CHUNK, self.prompt) if at < self.prompt else at + 1
        sequence.resize(capacity=end)
        sequence.commit(self.tokens[sequence.committed : end], snapshot=True)
        return True


@pytest.mark.parametrize("static", [False, True], ids=["V2", "V1"])
@pytest.mark.parametrize("shape", SHAPES)
@settings(max_examples=20)
@given(
    seed=st.integers(0, 1 << 30),
    spare=st.integers(0, 12),
    policy=st.sampled_from(["all_reusable", "per_request", "per_conversation"]),
    scratch=st.booleans(),
)
def test_promised_requests_never_fail_for_want_of_pages(
    shape: str, static: bool, seed: int, spare: int, policy: CommitPolicy, scratch: bool
) -> None:
    build: Callable[..., KVCacheManager] = StaticKVCacheManager if static else KVCacheManager
    shaped = (build_static_layout if static else build_layout)(model(*SHAPES[shape]), tokens_per_block=4)
    rewind = 0 if scratch else None
    least = reserved_slots(shaped, LONGEST, CHUNK, max_rewind_tokens=rewind)
    options = PoolOptions(commit_policy="all_reusable" if static else policy, window_scratch=scratch)
    manager = build(shaped, [slots + spare for slots in least], options=options)
    draw = random.Random(seed)
    running: list[Running] = []
    holds: list[Hold] = []
    admitted = 0
    for _ in range(60):
        if draw.random() < 0.4:
            tokens = [draw.randrange(2) for _ in range(draw.randrange(1, LONGEST + 1))]
            prompt = draw.randrange(1, len(tokens) + 1)
            need = reserved_slots(shaped, len(tokens), CHUNK, max_rewind_tokens=rewind)
            verdict = manager.can_admit(need)
            assert verdict.admitted or (not verdict.permanent and (running or holds)), "an idle pool admits what fits"
            if verdict.admitted:
                sequence = manager.create_sequence("r", need, token_ids=tokens[: prompt - 1])
                sequence.resume()
                running.append(Running(sequence, tokens, prompt))
                admitted += 1
        if running:
            request = draw.choice(running)
            if not request.step():
                running.remove(request)
                if draw.random() < 0.5:
                    holds.append(manager.hold(request.sequence.pages(len(request.tokens)), Access.READ))
                request.sequence.close()
        if holds and draw.random() < 0.3:
            manager.release(holds.pop(draw.randrange(len(holds))))
        manager.check_integrity()
    assert admitted


def test_pages_that_a_transfer_reads_are_not_counted_as_the_reader_of_the_prefix_alone() -> None:
    """A request reuses pages that a transfer still reads, and lets them leave its window."""
    manager = KVCacheManager(layout([8], tokens_per_block=4), [9])
    prompt = list(range(1, 61))
    first = manager.create_sequence("first", reserved_slots(manager.layout, 12, 4), token_ids=prompt[:11])
    first.resume()
    for end in (4, 8, 12):
        first.resize(capacity=end)
        first.commit(prompt[first.committed : end])
    hold = manager.hold(first.pages(12), Access.READ)
    first.close()
    need = reserved_slots(manager.layout, 60, 4)
    second = manager.create_sequence("second", need, token_ids=prompt[:10])
    second.resume()
    assert second.reused_tokens
    assert not manager.can_admit(need).admitted
    while second.capacity < 60:
        second.resize(capacity=second.history + 4 - second.history % 4)
        second.commit([7] * (second.capacity - second.committed))
    manager.release(hold)
    assert manager.can_admit(need).admitted


def test_sequence_without_a_reservation_does_not_share_pages_of_one_that_will_need_others_for_them() -> None:
    need = reserved_slots(layout([8], tokens_per_block=4), 60, 4)
    manager = KVCacheManager(layout([8], tokens_per_block=4), need)
    promised = manager.create_sequence("promised", need)
    promised.resume()
    promised.resize(capacity=10)
    promised.commit(range(10))
    other = manager.create_sequence("other", token_ids=range(8))
    assert other.reused_tokens == 0
    for end in range(12, 61, 4):
        promised.resize(capacity=end)
        promised.commit(range(promised.committed, end))
    assert promised.committed == 60
