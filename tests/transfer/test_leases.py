"""Leases: who stands by an attempt says so, in batches; who stops saying so ends it, on both sides."""

import dataclasses
import itertools

import pytest

from kvferry.cache.errors import TransferError, TransferTimeout
from kvferry.transfer.leases import RENEWALS_PER_LEASE, Leases
from kvferry.transfer.outcomes import cancelled
from kvferry.transfer.types import (
    MAX_RENEWED,
    Direction,
    Grant,
    Message,
    Renewal,
    ResultStatus,
    Side,
    TransferKey,
    TransferResult,
    WorkerId,
)
from tests.helpers import wait_until
from tests.transfer.bending import lose, start_transfer, sweep, total_quarantined
from tests.transfer.pairs import PROMPT_TOKENS, WAIT_SECONDS, End, Pair, pair

LEASE = 9.0
STEP = LEASE / RENEWALS_PER_LEASE
US, THEM = WorkerId("us", 1), WorkerId("them", 2)


def keys(count: int) -> list[TransferKey]:
    return [TransferKey(f"{index:032x}", 1) for index in range(count)]


def renewals(end: End) -> list[Renewal]:
    return [message for message in end.sent if isinstance(message, Renewal)]


def pass_time(running: Pair, seconds: float) -> None:
    """Let the clock run in steps short enough for every renewal."""
    for _ in range(int(seconds / STEP) + 1):
        running.clock.now += STEP
        sweep(running)


def test_leases_are_due_three_times_per_lease_and_never_twice_at_once() -> None:
    leases = Leases(US, LEASE)
    assert [leases.due(now) for now in (0.0, 0.1, STEP - 0.1, STEP, STEP + 0.1, 2 * STEP)] == [
        True,
        False,
        False,
        True,
        False,
        True,
    ]


def test_renewals_name_all_attempts_of_a_peer_in_one_message_up_to_the_bound() -> None:
    many = keys(MAX_RENEWED + 3)
    other = WorkerId("other", 3)
    attempts = [(THEM, key) for key in many] + [(other, many[0])]
    made = list(Leases(US, LEASE).renewals(Side.SENDER, attempts))
    assert [(peer, len(renewal.keys)) for peer, renewal in made] == [(THEM, MAX_RENEWED), (THEM, 3), (other, 1)]
    assert list(itertools.chain(*(renewal.keys for _, renewal in made))) == [*many, many[0]]
    assert {(renewal.origin, renewal.side, renewal.lease_seconds) for _, renewal in made} == {(US, Side.SENDER, LEASE)}


def test_queued_receiver_keeps_the_offer_alive_far_beyond_its_hold() -> None:
    with pair(lease_seconds=LEASE) as running:
        source, target, key = running.sender.fill(PROMPT_TOKENS), running.receiver.room(PROMPT_TOKENS), running.key()
        running.offer(key, source, timeout=1e4, hold_seconds=LEASE)
        running.receiver.transceiver.enlist(key, (running.sender.worker,), 1e4)
        pass_time(running, 20 * LEASE)
        assert running.sender.transceiver.num_sending == 1
        running.request(key, target)
        assert running.wait_outcome(running.receiver).error is None
        assert running.wait_outcome(running.sender).error is None


def test_offer_nobody_asks_for_ends_with_its_hold() -> None:
    with pair(lease_seconds=LEASE) as running:
        source = running.sender.fill(PROMPT_TOKENS)
        running.offer(running.key(), source, timeout=1e4, hold_seconds=20.0)
        running.clock.now += 21.0
        error = running.wait_outcome(running.sender).error
        assert isinstance(error, TransferTimeout)
        assert "lease_expired" in str(error)
        source.close()
        assert running.sender.is_empty()


def test_receiver_that_stops_renewing_fails_the_attempt_on_both_sides() -> None:
    with pair(lease_seconds=LEASE) as running:
        source, key = running.sender.fill(PROMPT_TOKENS), running.key()
        running.offer(key, source, timeout=1e4, hold_seconds=2 * LEASE)
        running.receiver.transceiver.enlist(key, (running.sender.worker,), 1e4)
        pass_time(running, LEASE)
        running.receiver.bend = lose(Renewal)
        pass_time(running, 2 * LEASE)
        for end in (running.sender, running.receiver):
            error = running.wait_outcome(end).error
            assert isinstance(error, TransferTimeout)
            assert "lease_expired" in str(error)
        source.close()
        assert running.sender.is_empty()
        assert running.receiver.is_empty()


def test_sender_that_stops_renewing_fails_the_attempt_on_both_sides() -> None:
    with pair(lease_seconds=LEASE) as running:
        source, key = running.sender.fill(PROMPT_TOKENS), running.key()
        running.offer(key, source, timeout=1e4)
        running.receiver.transceiver.enlist(key, (running.sender.worker,), 1e4)
        pass_time(running, LEASE)
        assert renewals(running.sender)
        running.sender.bend = lose(Renewal)
        pass_time(running, 2 * LEASE)
        for end in (running.receiver, running.sender):
            error = running.wait_outcome(end).error
            assert isinstance(error, TransferTimeout)
            assert f"the lease of {running.sender.worker} ran out" in str(error)
        source.close()
        assert running.sender.is_empty()


def test_expiry_never_frees_an_exposed_page() -> None:
    def only_grants(message: Message) -> Message | None:
        return message if isinstance(message, Grant) else None

    with pair(lease_seconds=LEASE) as running:
        running.sender.bend = lambda message: None
        running.receiver.bend = only_grants
        running.receiver.transceiver.on_notification = lambda notification: None  # type: ignore[method-assign]
        _, source, target = start_transfer(running, timeout=60.0)
        pages = len(running.receiver.page_bytes(target))
        running.wait_outcome(running.sender)
        running.clock.now += 61.0
        assert isinstance(running.wait_outcome(running.receiver).error, TransferTimeout)
        target.close()
        source.close()
        pass_time(running, 10 * LEASE)
        wait_until(lambda: total_quarantined(running) == pages, WAIT_SECONDS, "pages are in quarantine")
        assert not running.receiver.is_empty()


@pytest.mark.parametrize("lost", [Renewal, TransferResult])
def test_renewal_of_an_attempt_that_ended_is_answered_at_once(lost: type) -> None:
    with pair(lease_seconds=LEASE) as running:
        running.sender.bend = lose(lost)
        source, key = running.sender.fill(PROMPT_TOKENS), running.key()
        running.offer(key, source, timeout=1e4)
        running.receiver.transceiver.enlist(key, (running.sender.worker,), 1e4)
        pass_time(running, STEP)
        running.sender.transceiver.cancel(key, "not wanted")
        running.wait_outcome(running.sender)
        running.sender.bend = lambda message: message
        pass_time(running, STEP)
        error = running.wait_outcome(running.receiver).error
        assert isinstance(error, TransferError)
        assert "not wanted" in str(error)


def test_renewal_of_a_stranger_is_ignored() -> None:
    with pair(lease_seconds=LEASE) as running:
        source, key = running.sender.fill(PROMPT_TOKENS), running.key()
        running.offer(key, source, timeout=1e4, hold_seconds=2 * LEASE)
        running.receiver.transceiver.enlist(key, (running.sender.worker,), 1e4)
        pass_time(running, STEP)
        running.receiver.bend = lose(Renewal)
        stranger = dataclasses.replace(running.receiver.worker, incarnation=5)
        for _ in range(6):
            running.sender.transceiver.on_renewal(stranger, Renewal(stranger, Side.RECEIVER, (key,), 1e4))
            pass_time(running, STEP)
        assert isinstance(running.wait_outcome(running.sender).error, TransferTimeout)


def test_long_transfer_is_renewed_by_both_sides(direction: Direction) -> None:
    with pair(lease_seconds=LEASE, direction=direction) as running:
        running.sender.bend = running.receiver.bend = lambda message: message if isinstance(message, Renewal) else None
        _, source, target = start_transfer(running, timeout=1e4)
        pass_time(running, LEASE)
        assert renewals(running.receiver)
        assert not running.receiver.poll()
        source.close()
        target.close()
        running.sender.bend = running.receiver.bend = lambda message: message
        for end in (running.sender, running.receiver):
            end.transceiver.abandon("over").result(WAIT_SECONDS)
        wait_until(running.sender.is_empty, WAIT_SECONDS, "the sender's pages")
        wait_until(running.receiver.is_empty, WAIT_SECONDS, "the receiver's pages")


def test_receiver_that_queues_says_so_at_once() -> None:
    with pair(lease_seconds=300.0) as running:
        source, key = running.sender.fill(PROMPT_TOKENS), running.key()
        running.offer(key, source, timeout=1e4, hold_seconds=5.0)
        sweep(running)
        running.receiver.transceiver.enlist(key, (running.sender.worker,), 1e4)
        wait_until(lambda: renewals(running.receiver), WAIT_SECONDS, "a sign of life without waiting for the interval")
        sweep(running)
        running.clock.now += 20.0
        sweep(running)
        assert running.sender.poll() == []


def test_renewal_that_crosses_the_end_of_a_good_transfer_changes_nothing(direction: Direction) -> None:
    held: list[object] = []
    with pair(lease_seconds=LEASE, direction=direction) as running:
        receiver = running.receiver.transceiver
        receiver.on_notification = held.append  # type: ignore[method-assign, assignment]
        key, _, _ = start_transfer(running)
        if direction is Direction.PUSH:
            wait_until(lambda: held, WAIT_SECONDS, "the data has landed, and nobody has seen it")
        assert running.wait_outcome(running.sender).error is None
        running.sender.transceiver.on_renewal(
            running.receiver.worker, Renewal(running.receiver.worker, Side.RECEIVER, (key,), LEASE)
        )
        sweep(running)
        del receiver.on_notification
        for notification in held:
            receiver._reactor.call(lambda n=notification: receiver.on_notification(n)).result(WAIT_SECONDS)  # type: ignore[misc]
        assert running.wait_outcome(running.receiver).error is None


def test_failed_result_after_a_good_one_changes_nothing() -> None:
    held: list[object] = []
    with pair(lease_seconds=LEASE) as running:
        receiver = running.receiver.transceiver
        receiver.on_notification = held.append  # type: ignore[method-assign, assignment]
        start_transfer(running)
        assert running.wait_outcome(running.sender).error is None
        [good] = [message for message in running.sender.sent if isinstance(message, TransferResult)]
        late = dataclasses.replace(good, status=ResultStatus.FAILED, aux=None, failure=cancelled("too late"))
        receiver.on_result(running.sender.worker, late)
        sweep(running)
        wait_until(lambda: held, WAIT_SECONDS, "the data has landed, and nobody has seen it")
        del receiver.on_notification
        for notification in held:
            receiver._reactor.call(lambda n=notification: receiver.on_notification(n)).result(WAIT_SECONDS)  # type: ignore[misc]
        assert running.wait_outcome(running.receiver).error is None


def test_lost_result_costs_a_lease_and_not_the_deadline(direction: Direction) -> None:
    with pair(lease_seconds=LEASE, direction=direction) as running:
        running.sender.bend = lose(TransferResult)
        start_transfer(running, timeout=1e4)
        assert running.wait_outcome(running.sender).error is None
        pass_time(running, 2 * LEASE)
        error = running.wait_outcome(running.receiver).error
        assert isinstance(error, TransferTimeout)
        assert "lease_expired" in str(error)
