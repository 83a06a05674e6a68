"""Receivers that have some, or all, of a prompt already and want only the rest."""

import dataclasses
import itertools
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from kvferry.cache.errors import PeerLost, RemoteProtocolError, TransferCancelled, TransferTimeout
from kvferry.cache.holds import Access, Hold
from kvferry.cache.page_table import BlockLists
from kvferry.cache.spec import ModelSpec
from kvferry.transfer.notice import Notice
from kvferry.transfer.transport.base import Notification
from kvferry.transfer.types import Cancel, Direction, Grant, ResultStatus, TransferKey, TransferResult
from tests.helpers import wait_until
from tests.transfer.bending import lose, results, sweep, total_quarantined
from tests.transfer.pairs import PROMPT_TOKENS, WAIT_SECONDS, End, Message, Pair, aux_of, pair, prompt_of
from tests.transfer.tables import HYBRID, MIXED, PLAIN, SCALED, lists

NUM_BLOCKS = 8
"""Of the prompt."""

NOTHING = lists([-1] * NUM_BLOCKS, [-1] * NUM_BLOCKS)
"""What a receiver of `PLAIN` asks for when it has the whole prompt."""

MODELS = [pytest.param(model, id=model.name) for model in (PLAIN, SCALED, HYBRID, MIXED)]


def without(pages: BlockLists, groups: set[int]) -> BlockLists:
    """The same lists, naming no page in these groups."""
    slots = tuple(np.full_like(s, -1) if g in groups else s for g, s in enumerate(pages.slots))
    epochs = tuple(np.zeros_like(e) if g in groups else e for g, e in enumerate(pages.epochs))
    return BlockLists(slots, epochs)


def request(running: Pair, key: TransferKey, pages: BlockLists, timeout: float = 60.0) -> None:
    receiver, senders = running.receiver.transceiver, (running.sender.worker,)
    receiver.request(key, senders, pages, prompt_of(PROMPT_TOKENS), timeout, direction=running.direction)


def slots_of(end: End, pool_group: int) -> Iterator[torch.Tensor]:
    """Each pool of a group. Shapes: [num_slots, bytes of a slot]."""
    layout, storage = end.manager.layout, end.manager.storage
    for index, size in zip(storage.pool_indices(pool_group), layout.pool_groups[pool_group].pool_bytes, strict=True):
        yield storage.pools[index].view(-1, size)


def check_content(running: Pair, sent: BlockLists, got: BlockLists, room: BlockLists) -> None:
    """Pages that were asked for hold the sender's bytes, other pages of the sequence still hold zeros."""
    for group in running.receiver.manager.layout.life_cycles:
        lines = (pages.slots[group.id].tolist() for pages in (sent, got, room))
        for here, asked, there in zip(*lines, strict=True):
            pools = zip(*(slots_of(end, group.pool_group) for end in (running.sender, running.receiver)), strict=True)
            for source, target in pools:
                assert there < 0 or target[there].equal(source[here] if asked >= 0 else torch.zeros_like(target[there]))


@pytest.mark.parametrize("skipped", [0, 1, 5, 6, 7, 8])
@pytest.mark.parametrize("model", MODELS)
def test_only_the_blocks_after_the_known_ones_are_moved(model: ModelSpec, skipped: int, direction: Direction) -> None:
    with pair(model=model, direction=direction) as running:
        source, target, key = running.sender.fill(PROMPT_TOKENS), running.receiver.room(PROMPT_TOKENS), running.key()
        asked = target.pages(PROMPT_TOKENS, skip_blocks=skipped)
        running.offer(key, source)
        request(running, key, asked)
        outcome = running.wait_outcome(running.receiver)
        assert (outcome.error, outcome.aux) == (None, aux_of(PROMPT_TOKENS))
        assert outcome.wire.num_pages == asked.num_pages
        assert (outcome.wire.num_bytes > 0) == (asked.num_pages > 0) == (skipped < NUM_BLOCKS)
        check_content(running, source.pages(PROMPT_TOKENS), asked, target.pages(PROMPT_TOKENS))


@pytest.mark.parametrize("num_absent", [1, 2, 3])
def test_groups_without_any_page_move_nothing(num_absent: int, direction: Direction) -> None:
    with pair(model=MIXED, direction=direction) as running:
        source, target = running.sender.fill(PROMPT_TOKENS), running.receiver.room(PROMPT_TOKENS)
        room = target.pages(PROMPT_TOKENS)
        for count, absent in enumerate(itertools.combinations(range(3), num_absent), 1):
            key, asked = running.key(), without(room, set(absent))
            for pool in running.receiver.manager.storage.pools:
                pool.zero_()
            running.offer(key, source)
            request(running, key, asked)
            outcome = running.wait_outcome(running.receiver, count)
            assert (outcome.key, outcome.error, outcome.aux) == (key, None, aux_of(PROMPT_TOKENS))
            assert outcome.wire.num_pages == asked.num_pages
            check_content(running, source.pages(PROMPT_TOKENS), asked, room)
            assert running.wait_outcome(running.sender, count).error is None
        source.close()
        target.close()
        assert running.sender.is_empty()
        assert running.receiver.is_empty()


def test_nothing_to_move_still_brings_the_first_token(direction: Direction) -> None:
    with pair(direction=direction) as running:
        source, key = running.sender.fill(PROMPT_TOKENS), running.key()
        running.offer(key, source)
        source.close()
        request(running, key, NOTHING)
        outcome = running.wait_outcome(running.receiver)
        assert (outcome.key, outcome.error, outcome.aux) == (key, None, aux_of(PROMPT_TOKENS))
        assert (outcome.wire.num_slices, outcome.wire.num_pages, outcome.wire.num_bytes) == (0, 0, 0)
        assert running.wait_outcome(running.sender).error is None
        assert running.sender.is_empty()
        assert running.receiver.transceiver.num_receiving == running.sender.transceiver.num_sending == 0


def test_request_for_nothing_that_times_out_leaves_nothing_in_doubt(direction: Direction) -> None:
    with pair(direction=direction) as running:
        running.receiver.bend = lose(Grant)
        request(running, running.key(), NOTHING, timeout=5.0)
        running.clock.now += 6.0
        assert isinstance(running.wait_outcome(running.receiver).error, TransferTimeout)
        sweep(running)
        assert running.receiver.transceiver.num_receiving == total_quarantined(running) == 0
        assert not running.receiver.transceiver._holds


def test_request_for_nothing_can_be_cancelled(direction: Direction) -> None:
    with pair(direction=direction) as running:
        running.receiver.bend = lose(Grant)
        key = running.key()
        request(running, key, NOTHING)
        running.receiver.transceiver.cancel(key, "not wanted")
        assert isinstance(running.wait_outcome(running.receiver).error, TransferCancelled)
        assert [type(message) for message in running.receiver.sent] == [Grant, Cancel]


def test_request_for_nothing_fails_when_its_channel_is_lost(direction: Direction) -> None:
    with pair(direction=direction) as running:
        running.receiver.bend = lose(Grant)
        request(running, running.key(), NOTHING)
        running.receiver.transceiver.on_channel_lost(running.sender.worker, "stream broke")
        assert isinstance(running.wait_outcome(running.receiver).error, PeerLost)
        sweep(running)
        assert not running.receiver.transceiver._holds


def test_grant_for_nothing_that_never_left_fails(direction: Direction) -> None:
    with pair(direction=direction) as running:
        running.receiver.connected = False
        request(running, running.key(), NOTHING)
        assert isinstance(running.wait_outcome(running.receiver).error, PeerLost)
        assert running.receiver.transceiver.failure is None


def test_notice_of_a_write_that_nobody_asked_for_is_refused() -> None:
    with pair() as running:
        running.receiver.bend = lose(Grant)
        key, transceiver = running.key(), running.receiver.transceiver
        request(running, key, NOTHING)
        wait_until(lambda: running.receiver.sent, WAIT_SECONDS, "the grant is under way")
        [grant] = running.receiver.sent
        assert isinstance(grant, Grant)
        stray = Notice(key, running.receiver.worker.incarnation, grant.fence, 0, 1)
        agent = running.sender.transceiver.info.agent_name
        refused = transceiver._reactor.call(lambda: transceiver._receiver.on_notice(agent, stray))
        with pytest.raises(RemoteProtocolError, match="1 slices now, 0 before"):
            refused.result(WAIT_SECONDS)
        notification = Notification(agent, stray.pack())
        transceiver._reactor.call(lambda: transceiver.on_notification(notification)).result(WAIT_SECONDS)
        running.offer(key, running.sender.fill(PROMPT_TOKENS))
        running.sender.transceiver.on_grant(running.receiver.worker, grant)
        assert running.wait_outcome(running.receiver).error is None


def test_result_that_accounts_for_pages_nobody_asked_for_is_refused() -> None:
    def inflate(message: Message) -> Message:
        if isinstance(message, TransferResult) and message.aux:
            return dataclasses.replace(message, wire=dataclasses.replace(message.wire, num_pages=1, num_slices=1))
        return message

    with pair() as running:
        running.sender.bend = inflate
        key = running.key()
        running.offer(key, running.sender.fill(PROMPT_TOKENS))
        request(running, key, NOTHING)
        assert "accounts for 1 pages in 1 slices, 0 pages were granted" in str(
            running.wait_outcome(running.receiver).error
        )
        assert results(running)[0].status is ResultStatus.OK


def test_offers_are_held_for_reading_and_requests_for_writing() -> None:
    with pair() as running:
        holds: dict[str, list[Hold]] = {}
        for end in (running.sender, running.receiver):
            watch_holds(end, holds.setdefault(end.worker.name, []))
        source, target, key = running.sender.fill(PROMPT_TOKENS), running.receiver.room(PROMPT_TOKENS), running.key()
        running.offer(key, source)
        running.request(key, target)
        assert running.wait_outcome(running.receiver).error is None
        assert {name: [hold.access for hold in made] for name, made in holds.items()} == {
            "p": [Access.READ],
            "d": [Access.WRITE],
        }


def watch_holds(end: End, made: list[Hold]) -> None:
    hold = end.manager.hold

    def watched(pages: BlockLists, access: Access) -> Hold:
        made.append(hold(pages, access))
        return made[-1]

    end.manager.hold = watched  # type: ignore[method-assign]
