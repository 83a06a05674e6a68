"""Whole transfers over every transport: pages of one pool, of several, and of recurrent states."""

import pytest
import torch

from kvferry.cache.spec import ModelSpec
from tests.helpers import wait_until
from tests.transfer.pairs import (
    PROMPT_TOKENS,
    WAIT_SECONDS,
    End,
    MakeManager,
    aux_of,
    pair,
    v1_manager,
    v2_manager,
)
from tests.transfer.tables import HYBRID, MIXED, PLAIN, SCALED
from tests.transport_contract.conftest import MakeAgent

MODELS = [pytest.param(model, id=model.name) for model in (PLAIN, SCALED, HYBRID, MIXED)]


def untouched(end: End, written: list[list[int]]) -> bool:
    """Whether every slot but these, listed per pool group, still holds zeros in each of its pools."""
    for group, slots in zip(end.manager.layout.pool_groups, written, strict=True):
        for index, size in zip(end.manager.storage.pool_indices(group.id), group.pool_bytes, strict=True):
            pool = end.manager.storage.pools[index].view(-1, size).clone()
            pool[slots] = 0
            if pool.any():
                return False
    return True


@pytest.mark.parametrize("managers", [v1_manager, v2_manager])
@pytest.mark.parametrize("slice_bytes", [1 << 20, 700])
@pytest.mark.parametrize("model", MODELS)
def test_pages_arrive_in_every_pool_and_nothing_else_changes(
    make_agent: MakeAgent, model: ModelSpec, slice_bytes: int, managers: MakeManager
) -> None:
    with pair(make_agent, model=model, managers=managers, slice_bytes=slice_bytes) as running:
        source, target, key = running.sender.fill(PROMPT_TOKENS), running.receiver.room(PROMPT_TOKENS), running.key()
        expected = running.sender.page_bytes(source)
        running.offer(key, source)
        running.request(key, target)
        outcome = running.wait_outcome(running.receiver)
        assert (outcome.error, outcome.aux) == (None, aux_of(PROMPT_TOKENS))
        assert running.receiver.page_bytes(target) == expected
        assert (outcome.wire.num_pages, outcome.wire.num_bytes) == (len(expected), sum(map(len, expected)))
        assert outcome.wire.num_slices == 1 or slice_bytes == 700
        written: list[list[int]] = [[] for _ in running.receiver.manager.layout.pool_groups]
        for group in running.receiver.manager.layout.life_cycles:
            written[group.pool_group] += [slot for slot in target.slots(group.id).tolist() if slot >= 0]
        assert untouched(running.receiver, written)
        assert running.wait_outcome(running.sender).error is None
        source.close()
        target.close()
        assert running.sender.is_empty()
        assert running.receiver.is_empty()


@pytest.mark.parametrize("tokens", [1, 4, 30])
def test_recurrent_state_arrives_where_the_receiver_keeps_it(make_agent: MakeAgent, tokens: int) -> None:
    with pair(make_agent, model=HYBRID) as running:
        source, target, key = running.sender.fill(tokens), running.receiver.room(tokens), running.key()
        running.offer(key, source, tokens)
        running.request(key, target, tokens)
        assert running.wait_outcome(running.receiver).error is None
        for role in ("conv_state", "ssm_state"):
            sent = running.sender.manager.state(2, role)[source.state_slot]
            got = running.receiver.manager.state(2, role)[target.state_slot]
            assert sent.view(torch.int32).any()
            assert torch.equal(got.view(torch.int32), sent.view(torch.int32))


@pytest.mark.parametrize("model", MODELS)
def test_blocks_the_receiver_has_are_not_moved(make_agent: MakeAgent, model: ModelSpec) -> None:
    with pair(make_agent, model=model) as running:
        for skipped, moves in ((3, True), (PROMPT_TOKENS, False)):
            key = running.key()
            source, target = running.sender.fill(PROMPT_TOKENS), running.receiver.room(PROMPT_TOKENS)
            wanted = target.pages(PROMPT_TOKENS, skip_blocks=skipped).num_pages
            running.offer(key, source)
            running.request(key, target, skip_blocks=skipped)
            wait_until(lambda key=key: key in {o.key for o in running.receiver.poll()}, WAIT_SECONDS, "it ended")
            outcome = running.receiver.outcomes[-1]
            assert (outcome.error, outcome.aux, outcome.wire.num_pages) == (None, aux_of(PROMPT_TOKENS), wanted)
            assert (wanted > 0) == (outcome.wire.num_bytes > 0) == moves
