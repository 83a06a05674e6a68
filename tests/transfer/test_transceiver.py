"""The whole transfer side in one process: real transports, real threads, and nothing that fails."""

import itertools
import threading

import pytest

from kvferry.cache.errors import (
    CapacityError,
    ConfigError,
    TransferCancelled,
    TransportError,
)
from kvferry.transfer.outcomes import cancelled
from kvferry.transfer.transport.loopback import LoopbackTransport
from kvferry.transfer.types import Cancel, Direction, Side
from tests.helpers import wait_until
from tests.transfer.bending import start_transfer, sweep, total_quarantined
from tests.transfer.pairs import PROMPT_TOKENS, WAIT_SECONDS, aux_of, pair, prompt_of


@pytest.mark.parametrize("tokens", [1, 3, 4, 5, 8, 9, 15, 16, 30, 64])
def test_pages_arrive_byte_for_byte_and_everything_is_free_afterwards(tokens: int, direction: Direction) -> None:
    with pair() as running:
        source, target, key = running.sender.fill(tokens), running.receiver.room(tokens), running.key()
        running.offer(key, source, tokens)
        running.request(key, target, tokens)
        outcome = running.wait_outcome(running.receiver)
        assert (outcome.key, outcome.side, outcome.error, outcome.aux) == (key, Side.RECEIVER, None, aux_of(tokens))
        assert running.receiver.page_bytes(target) == running.sender.page_bytes(source)
        assert outcome.wire.num_pages == len(running.sender.page_bytes(source))
        assert outcome.wire.num_bytes == sum(map(len, running.sender.page_bytes(source)))
        assert running.wait_outcome(running.sender).error is None
        source.close()
        target.close()
        assert running.sender.is_empty()
        assert running.receiver.is_empty()


def test_neighbouring_slots_become_one_descriptor(direction: Direction) -> None:
    with pair(direction=direction) as running:
        source, target, key = running.sender.fill(64), running.receiver.room(64), running.key()
        running.offer(key, source, 64)
        running.request(key, target, 64)
        wire = running.wait_outcome(running.receiver).wire
        runs = [
            list(zip(source.slots(group.id).tolist(), target.slots(group.id).tolist(), strict=True))
            for group in running.sender.manager.layout.life_cycles
        ]
        pairs = [pair for run in runs for pair in run if pair[1] >= 0]
        breaks = sum((b[0] - a[0], b[1] - a[1]) != (1, 1) for a, b in itertools.pairwise(pairs))
        assert wire.num_pages == len(pairs)
        assert wire.num_descriptors == 1 + breaks < len(pairs)


def test_source_sequence_may_close_while_its_pages_are_offered(direction: Direction) -> None:
    with pair(direction=direction) as running:
        source, target, key = running.sender.fill(PROMPT_TOKENS), running.receiver.room(PROMPT_TOKENS), running.key()
        expected = running.sender.page_bytes(source)
        running.offer(key, source)
        source.close()
        assert not running.sender.is_empty()
        running.request(key, target)
        assert running.wait_outcome(running.receiver).error is None
        assert running.receiver.page_bytes(target) == expected
        running.wait_outcome(running.sender)
        assert running.sender.is_empty()


def test_large_transfer_is_cut_into_slices_and_completes_after_the_last(direction: Direction) -> None:
    with pair(direction=direction, slice_bytes=2 * 1024) as running:
        source, target, key = running.sender.fill(64), running.receiver.room(64), running.key()
        running.offer(key, source, 64)
        running.request(key, target, 64)
        outcome = running.wait_outcome(running.receiver)
        assert outcome.wire.num_slices > 3
        assert running.receiver.page_bytes(target) == running.sender.page_bytes(source)


def test_many_transfers_at_once_do_not_mix(direction: Direction) -> None:
    with pair(direction=direction, num_slots=256, slice_bytes=1024) as running:
        jobs = []
        source = running.sender.fill(PROMPT_TOKENS)
        expected = running.sender.page_bytes(source)
        for _ in range(8):
            key, target = running.key(), running.receiver.room(PROMPT_TOKENS)
            running.offer(key, source)
            jobs.append((key, target))
        for key, target in reversed(jobs):
            running.request(key, target)
        running.wait_outcome(running.receiver, len(jobs))
        assert {outcome.key for outcome in running.receiver.outcomes} == {key for key, _ in jobs}
        for _, target in jobs:
            assert running.receiver.page_bytes(target) == expected


def test_too_many_open_transfers_are_refused_and_hold_nothing() -> None:
    with pair(max_transfers=1) as running:
        source = running.sender.fill(PROMPT_TOKENS)
        running.offer(running.key(), source)
        with pytest.raises(CapacityError, match="max_transfers"):
            running.offer(running.key(), source)
        assert running.sender.transceiver.num_sending == 1


def test_broken_transport_fails_every_open_transfer_and_refuses_new_ones() -> None:
    class Broken(LoopbackTransport):
        breaks = False

        def notifications(self) -> list:  # type: ignore[type-arg]
            if type(self).breaks:
                raise TransportError("loopback", "BROKEN", "broken by the test")
            return super().notifications()

    with pair(Broken) as running:
        source, target = running.sender.fill(PROMPT_TOKENS), running.receiver.room(PROMPT_TOKENS)
        running.offer(running.key(), source)
        running.receiver.bend = lambda message: None
        running.request(running.key(), target)
        Broken.breaks = True
        for end in (running.sender, running.receiver):
            assert "broken by the test" in str(running.wait_outcome(end).error)
            assert end.transceiver.failure is not None
        assert total_quarantined(running) == len(running.receiver.page_bytes(target))
        with pytest.raises(TransportError, match="reactor ended"):
            running.offer(running.key(), source)


def test_cancel_message_for_an_unknown_transfer_is_ignored() -> None:
    with pair() as running:
        running.sender.transceiver.on_cancel(
            running.receiver.worker, Cancel(running.key(), running.receiver.worker, cancelled("never heard of it"))
        )
        source, target, key = running.sender.fill(PROMPT_TOKENS), running.receiver.room(PROMPT_TOKENS), running.key()
        running.offer(key, source)
        running.request(key, target)
        assert running.wait_outcome(running.receiver).error is None


def test_cancel_while_the_grant_waits_for_the_device_sends_no_grant() -> None:
    with pair() as running:
        ready: list[bool] = []
        running.receiver.manager.storage.record_event = lambda: lambda: bool(ready)  # type: ignore[method-assign]
        key, _, target = start_transfer(running)
        running.receiver.transceiver.cancel(key, "not wanted")
        assert isinstance(running.wait_outcome(running.receiver).error, TransferCancelled)
        ready.append(True)
        sweep(running)
        [cancel] = running.receiver.sent
        assert isinstance(cancel, Cancel)
        assert (cancel.fence, cancel.failure.message) == (0, "not wanted")
        target.close()
        wait_until(running.receiver.is_empty, WAIT_SECONDS, "nothing was ever granted")


def test_grant_waits_until_the_device_is_done_with_the_pages() -> None:
    with pair() as running:
        ready: list[bool] = []
        running.receiver.manager.storage.record_event = lambda: lambda: bool(ready)  # type: ignore[method-assign]
        start_transfer(running)
        running.receiver.transceiver.lanes().result(WAIT_SECONDS)
        assert not running.receiver.sent
        ready.append(True)
        assert running.wait_outcome(running.receiver).error is None


def test_pages_are_free_by_the_time_the_outcome_is_heard() -> None:
    with pair() as running:
        start_transfer(running)
        running.wait_outcome(running.receiver)
        assert [usage.transferring for usage in running.receiver.manager.usage()] == [0]


def test_future_that_nobody_waits_for_any_more_does_not_stop_the_reactor() -> None:
    with pair() as running:
        gate = threading.Event()
        blocked = running.sender.transceiver._reactor.call(lambda: gate.wait(WAIT_SECONDS))
        abandoned = running.sender.transceiver.lanes()
        assert abandoned.cancel()
        gate.set()
        assert blocked.result(WAIT_SECONDS)
        assert running.sender.transceiver.lanes().result(WAIT_SECONDS)
        assert running.sender.transceiver.failure is None


def test_cancelled_transfers_make_room_at_once_although_their_pages_are_still_exposed() -> None:
    with pair(num_slots=128, max_transfers=1) as running:
        running.receiver.bend = lambda message: None
        for count in range(1, 4):
            key, target = running.key(), running.receiver.room(4)
            running.request(key, target, 4)
            running.receiver.transceiver.cancel(key, "not wanted")
            assert isinstance(running.wait_outcome(running.receiver, count).error, TransferCancelled)
        assert running.receiver.transceiver.num_receiving == 3


def test_request_without_a_sender_is_refused() -> None:
    with pair() as running:
        target = running.receiver.room(4)
        with pytest.raises(ConfigError, match="names no sender"):
            running.receiver.transceiver.request(running.key(), (), target.pages(4), prompt_of(4), 60.0)
        target.close()
        assert running.receiver.is_empty()
