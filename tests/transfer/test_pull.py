"""Reads that fail, stall or come late: whose pages are exposed to whom when the receiver drives the wire?"""

import dataclasses

from kvferry.cache.errors import PeerLost, TransferCancelled, TransferError, TransferTimeout
from kvferry.transfer.outcomes import cancelled
from kvferry.transfer.proofs import SETTLE_SECONDS
from kvferry.transfer.types import Cancel, Direction, Grant, Message, Permit, Renewal, TransferResult
from tests.helpers import wait_until
from tests.transfer.bending import LetsGo, Slow, lose, start_transfer, sweep
from tests.transfer.pairs import PROMPT_TOKENS, WAIT_SECONDS, End, Pair, pair


def quarantined(end: End) -> int:
    end.poll()
    return sum(end.transceiver.quarantined_slots())


def of_kind(end: End, kind: type) -> list[Message]:
    return [message for message in end.sent if isinstance(message, kind)]


def close_all(running: Pair, *sequences: object) -> None:
    for sequence in sequences:
        sequence.close()  # type: ignore[attr-defined]


def test_messages_of_a_pull_are_grant_permit_result() -> None:
    with pair(direction=Direction.PULL) as running:
        start_transfer(running)
        assert running.wait_outcome(running.receiver).error is None
        assert [type(message) for message in running.receiver.sent] == [Grant]
        assert [type(message) for message in running.sender.sent] == [Renewal, Permit, TransferResult]


def test_permit_of_other_pages_than_granted_is_refused_and_nothing_is_read() -> None:
    def shrink(message: Message) -> Message:
        if isinstance(message, Permit):
            for slots in message.pages.slots:
                slots[-1] = -1
        return message

    with pair(direction=Direction.PULL) as running:
        running.sender.bend = shrink
        _, source, target = start_transfer(running)
        assert "name different blocks" in str(running.wait_outcome(running.receiver).error)
        assert isinstance(running.wait_outcome(running.sender).error, TransferError)
        close_all(running, source, target)
        wait_until(running.receiver.is_empty, WAIT_SECONDS, "nothing was read")
        wait_until(running.sender.is_empty, WAIT_SECONDS, "the receiver says that it reads nothing")


def test_lost_permit_keeps_the_source_until_the_receiver_says_that_it_reads_nothing() -> None:
    with pair(direction=Direction.PULL) as running:
        running.sender.bend = lose(Permit)
        _, source, target = start_transfer(running, timeout=5.0)
        wait_until(lambda: of_kind(running.sender, Permit), WAIT_SECONDS, "the permit left")
        sweep(running)
        running.receiver.connected = False
        running.clock.now += 6.0
        assert isinstance(running.wait_outcome(running.receiver).error, TransferTimeout)
        assert isinstance(running.wait_outcome(running.sender).error, TransferTimeout)
        close_all(running, source, target)
        wait_until(running.receiver.is_empty, WAIT_SECONDS, "the receiver never read")
        running.clock.now += SETTLE_SECONDS + 1.0
        wait_until(lambda: quarantined(running.sender) > 0, WAIT_SECONDS, "the source is in quarantine")
        running.receiver.connected = True
        running.sender.transceiver.on_channel_up(running.receiver.worker)
        wait_until(running.sender.is_empty, WAIT_SECONDS, "asked again, the receiver says so")


def test_permit_that_never_left_exposes_nothing() -> None:
    with pair(direction=Direction.PULL) as running:
        running.sender.connected = False
        _, source, target = start_transfer(running, timeout=5.0)
        assert isinstance(running.wait_outcome(running.sender).error, PeerLost)
        source.close()
        assert running.sender.is_empty()
        running.clock.now += 6.0
        assert isinstance(running.wait_outcome(running.receiver).error, TransferTimeout)
        target.close()
        assert running.receiver.is_empty()


def test_cancel_during_a_read_keeps_both_sides_until_it_is_over() -> None:
    Slow.over = False
    with pair(Slow, direction=Direction.PULL) as running:
        running.sender.transceiver.on_notification = lambda notification: None  # type: ignore[method-assign]
        key, source, target = start_transfer(running)
        wait_until(lambda: running.receiver.transceiver._driver.busy, WAIT_SECONDS, "the read is under way")
        running.receiver.transceiver.cancel(key, "client went away")
        assert isinstance(running.wait_outcome(running.receiver).error, TransferCancelled)
        assert isinstance(running.wait_outcome(running.sender).error, TransferCancelled)
        close_all(running, source, target)
        assert not running.receiver.is_empty()
        assert not running.sender.is_empty()
        Slow.over = True
        running.clock.now += 1.0
        wait_until(running.receiver.is_empty, WAIT_SECONDS, "the read is over")
        wait_until(running.sender.is_empty, WAIT_SECONDS, "the receiver says so")
        assert [cancel.quiet for cancel in of_kind(running.receiver, Cancel)] == [False, True]  # type: ignore[union-attr]


def test_read_let_go_without_being_done_keeps_both_sides_in_doubt() -> None:
    LetsGo.failing = True
    with pair(LetsGo, direction=Direction.PULL) as running:
        running.sender.transceiver.on_notification = lambda notification: None  # type: ignore[method-assign]
        _, source, target = start_transfer(running)
        assert "read_failed" in str(running.wait_outcome(running.receiver).error)
        assert "read_failed" in str(running.wait_outcome(running.sender).error)
        close_all(running, source, target)
        running.clock.now += SETTLE_SECONDS + 1.0
        wait_until(lambda: quarantined(running.receiver) > 0, WAIT_SECONDS, "the target is in quarantine")
        wait_until(lambda: quarantined(running.sender) > 0, WAIT_SECONDS, "the source is in quarantine")
        running.sender.transceiver.close(WAIT_SECONDS)
        running.clock.now += 1.0
        wait_until(running.receiver.is_empty, WAIT_SECONDS, "its agent is gone: nothing more can come from there")


def test_lost_result_fails_a_read_that_the_owner_never_confirmed() -> None:
    with pair(direction=Direction.PULL) as running:
        running.sender.bend = lose(TransferResult)
        _, source, target = start_transfer(running, timeout=5.0)
        assert running.wait_outcome(running.sender).error is None
        sweep(running)
        assert running.receiver.poll() == []
        running.clock.now += 6.0
        assert isinstance(running.wait_outcome(running.receiver).error, TransferTimeout)
        close_all(running, source, target)
        wait_until(running.receiver.is_empty, WAIT_SECONDS, "its own reads are over")
        assert running.sender.is_empty()


def test_channel_lost_while_pages_are_read_puts_the_source_in_doubt_until_the_reads_are_seen_to_end() -> None:
    Slow.over = False
    with pair(Slow, direction=Direction.PULL) as running:
        _, source, target = start_transfer(running)
        wait_until(lambda: running.receiver.transceiver._driver.busy, WAIT_SECONDS, "the read is under way")
        held: list[object] = []
        running.sender.transceiver.on_notification = held.append  # type: ignore[method-assign]
        running.sender.transceiver.on_channel_lost(running.receiver.worker, "stream broke")
        assert isinstance(running.wait_outcome(running.sender).error, PeerLost)
        source.close()
        wait_until(lambda: quarantined(running.sender) > 0, WAIT_SECONDS, "the source is in quarantine")
        assert isinstance(running.wait_outcome(running.receiver).error, TransferError)
        Slow.over = True
        running.clock.now += 1.0
        target.close()
        wait_until(running.receiver.is_empty, WAIT_SECONDS, "the read is over")
        running.sender.transceiver.on_channel_up(running.receiver.worker)
        wait_until(running.sender.is_empty, WAIT_SECONDS, "the receiver says so")


def test_many_pages_are_read_in_slices_of_bounded_size() -> None:
    with pair(direction=Direction.PULL, slice_bytes=2 * 1024) as running:
        source, target, key = running.sender.fill(PROMPT_TOKENS), running.receiver.room(PROMPT_TOKENS), running.key()
        running.offer(key, source)
        running.request(key, target)
        outcome = running.wait_outcome(running.receiver)
        assert outcome.wire.num_slices > 1
        assert outcome.wire.lane == "memcpy"
        assert running.wait_outcome(running.sender).wire.num_pages == outcome.wire.num_pages


def test_failed_read_hangs_up_and_the_next_pairing_wires_the_lane_again() -> None:
    LetsGo.failing = True
    with pair(LetsGo, direction=Direction.PULL) as running:
        start_transfer(running)
        running.wait_outcome(running.receiver)
        wait_until(lambda: running.receiver.hung_up, WAIT_SECONDS, "the control plane is asked to close the channel")
        assert running.receiver.hung_up[0][0] == running.sender.worker
        before = running.receiver.transceiver._peers.find(running.sender.worker)
        LetsGo.failing = False
        running.receiver.transceiver.pair(running.sender.transceiver.info).result(WAIT_SECONDS)
        assert running.receiver.transceiver._peers.find(running.sender.worker) is not before
        key, _, _ = start_transfer(running)
        wait_until(
            lambda: any(outcome.key == key and outcome.error is None for outcome in running.receiver.poll()),
            WAIT_SECONDS,
            "it works again",
        )


def test_cancel_of_another_grant_is_no_word_about_the_reads_of_this_one() -> None:
    Slow.over = False
    with pair(Slow, direction=Direction.PULL) as running:
        running.sender.transceiver.on_notification = lambda notification: None  # type: ignore[method-assign]
        key, source, target = start_transfer(running)
        wait_until(lambda: running.receiver.transceiver._driver.busy, WAIT_SECONDS, "the read is under way")
        running.receiver.bend = lose(Cancel)
        stale = Cancel(key, running.receiver.worker, cancelled("an earlier one"), fence=7, quiet=True)
        running.sender.transceiver.on_cancel(running.receiver.worker, stale)
        assert isinstance(running.wait_outcome(running.sender).error, TransferCancelled)
        source.close()
        sweep(running)
        assert not running.sender.is_empty()
        running.receiver.bend = lambda message: message
        Slow.over = True
        running.clock.now += SETTLE_SECONDS + 1.0
        target.close()
        wait_until(running.sender.is_empty, WAIT_SECONDS, "the receiver says that its reads are over")


def test_receiver_waits_no_longer_than_it_is_permitted_to_read() -> None:
    def short(message: Message) -> Message:
        return dataclasses.replace(message, timeout_seconds=5.0) if isinstance(message, Permit) else message

    Slow.over = False
    with pair(Slow, direction=Direction.PULL) as running:
        running.sender.bend = short
        start_transfer(running)
        wait_until(lambda: running.receiver.transceiver._driver.busy, WAIT_SECONDS, "the read is under way")
        running.clock.now += 6.0
        sweep(running)
        Slow.over = True
        running.clock.now += 1.0
        assert isinstance(running.wait_outcome(running.receiver).error, TransferTimeout)
