"""Lost messages, timeouts, cancels and failing writes: when do pages come back, and when must they not?"""

import dataclasses

from kvferry.cache.errors import (
    PeerLost,
    TransferCancelled,
    TransferError,
    TransferTimeout,
    TransportError,
)
from kvferry.transfer.proofs import SETTLE_SECONDS
from kvferry.transfer.transport.base import Post, PostState
from kvferry.transfer.transport.loopback import LoopbackTransport
from kvferry.transfer.types import Grant, TransferResult
from tests.helpers import wait_until
from tests.transfer.bending import LetsGo, Slow, Stuck, lose, results, start_transfer, sweep, total_quarantined
from tests.transfer.pairs import PROMPT_TOKENS, WAIT_SECONDS, Message, pair


def test_offer_without_a_grant_is_released_after_its_timeout() -> None:
    with pair() as running:
        source = running.sender.fill(PROMPT_TOKENS)
        running.offer(running.key(), source, timeout=5.0)
        source.close()
        running.clock.now += 4.0
        assert not running.sender.is_empty()
        running.clock.now += 2.0
        assert isinstance(running.wait_outcome(running.sender).error, TransferTimeout)
        assert running.sender.is_empty()


def test_offer_cancelled_before_the_grant_is_released_at_once() -> None:
    with pair() as running:
        source, key = running.sender.fill(PROMPT_TOKENS), running.key()
        running.offer(key, source)
        source.close()
        running.sender.transceiver.cancel(key, "nobody wants it")
        running.sender.transceiver.cancel(key, "twice")
        error = running.wait_outcome(running.sender).error
        assert isinstance(error, TransferCancelled)
        assert "nobody wants it" in str(error)
        assert running.sender.is_empty()


def test_lost_result_times_out_but_landed_notices_prove_the_pages_quiet() -> None:
    with pair() as running:
        running.sender.bend = lose(TransferResult)
        source, target, key = running.sender.fill(PROMPT_TOKENS), running.receiver.room(PROMPT_TOKENS), running.key()
        running.offer(key, source)
        running.request(key, target, timeout=5.0)
        running.wait_outcome(running.sender)
        running.clock.now += 6.0
        assert isinstance(running.wait_outcome(running.receiver).error, TransferTimeout)
        target.close()
        assert running.receiver.is_empty()


def test_lost_grant_leaves_the_pages_in_doubt_and_out_of_circulation() -> None:
    with pair() as running:
        running.receiver.bend = lambda message: None
        target, key = running.receiver.room(PROMPT_TOKENS), running.key()
        pages = len(running.receiver.page_bytes(target))
        running.request(key, target, timeout=5.0)
        running.clock.now += 6.0
        assert isinstance(running.wait_outcome(running.receiver).error, TransferTimeout)
        target.close()
        sweep(running)
        assert total_quarantined(running) == 0
        assert not running.receiver.is_empty()
        running.clock.now += SETTLE_SECONDS + 1.0
        wait_until(lambda: total_quarantined(running) == pages, WAIT_SECONDS, "pages are in quarantine")
        running.clock.now += 1e6
        running.receiver.transceiver.cancel(key, "again")
        sweep(running)
        assert total_quarantined(running) == pages


def test_no_channel_fails_at_once_and_frees_the_pages() -> None:
    with pair() as running:
        running.receiver.connected = False
        target = running.receiver.room(PROMPT_TOKENS)
        running.request(running.key(), target)
        assert isinstance(running.wait_outcome(running.receiver).error, PeerLost)
        target.close()
        assert running.receiver.is_empty()


def test_receiver_cancel_reaches_the_sender_and_frees_both_sides() -> None:
    with pair() as running:
        running.receiver.bend = lose(Grant)
        source, target, key = running.sender.fill(PROMPT_TOKENS), running.receiver.room(PROMPT_TOKENS), running.key()
        running.offer(key, source)
        source.close()
        running.request(key, target)
        running.receiver.transceiver.cancel(key, "client went away")
        error = running.wait_outcome(running.sender).error
        assert isinstance(error, TransferCancelled)
        assert "client went away" in str(error)
        assert isinstance(running.wait_outcome(running.receiver).error, TransferCancelled)
        assert running.sender.is_empty()


def test_channel_lost_after_the_grant_puts_pages_in_doubt_until_the_data_is_seen_to_land() -> None:
    with pair() as running:
        held: list[Message] = []
        running.receiver.bend = lambda message: held.append(message)
        source, target, key = running.sender.fill(PROMPT_TOKENS), running.receiver.room(PROMPT_TOKENS), running.key()
        pages = len(running.receiver.page_bytes(target))
        running.offer(key, source)
        running.request(key, target)
        wait_until(lambda: held, WAIT_SECONDS, "the grant is under way")
        running.receiver.transceiver.on_channel_lost(running.sender.worker, "stream broke")
        assert isinstance(running.wait_outcome(running.receiver).error, PeerLost)
        target.close()
        wait_until(lambda: total_quarantined(running) == pages, WAIT_SECONDS, "pages are in quarantine")
        # The grant had been delivered after all: the late writer writes, and its notices are the proof.
        grant = held[0]
        assert isinstance(grant, Grant)
        running.sender.transceiver.on_grant(running.receiver.worker, grant)
        wait_until(running.receiver.is_empty, WAIT_SECONDS, "proof came, pages are back")
        assert total_quarantined(running) == 0


def test_channel_lost_before_any_write_fails_the_sender_and_frees_its_pages() -> None:
    class Unready(LoopbackTransport):
        def post(self, *args: object, **kwargs: object) -> Post:
            raise TransportError("loopback", "BUSY", "refused by the test")

    with pair(Unready) as running:
        source, target, key = running.sender.fill(PROMPT_TOKENS), running.receiver.room(PROMPT_TOKENS), running.key()
        running.offer(key, source)
        source.close()
        running.request(key, target)
        assert "refused by the test" in str(running.wait_outcome(running.receiver).error)
        target.close()
        wait_until(running.receiver.is_empty, WAIT_SECONDS, "the sender's word that nothing was posted is proof")
        wait_until(running.sender.is_empty, WAIT_SECONDS, "nothing was handed to the transport")


def test_write_that_cannot_be_taken_back_keeps_source_pages_until_it_is() -> None:
    Stuck.gives_up = False
    with pair(Stuck) as running:
        source, target, key = running.sender.fill(PROMPT_TOKENS), running.receiver.room(PROMPT_TOKENS), running.key()
        pages = len(running.sender.page_bytes(source))
        running.offer(key, source)
        source.close()
        running.request(key, target)
        assert running.wait_outcome(running.sender).error is not None
        assert isinstance(running.wait_outcome(running.receiver).error, TransferError)

        def quarantined() -> int:
            running.sender.poll()
            return sum(running.sender.transceiver.quarantined_slots())

        wait_until(lambda: quarantined() == pages, WAIT_SECONDS, "source pages are in quarantine")
        Stuck.gives_up = True
        running.clock.now += 1.0
        wait_until(running.sender.is_empty, WAIT_SECONDS, "the transport let go, pages are back")


def test_page_in_doubt_for_two_attempts_is_counted_once() -> None:
    Stuck.gives_up = False
    with pair(Stuck) as running:
        source = running.sender.fill(PROMPT_TOKENS)
        for _ in range(2):
            key = running.key()
            running.offer(key, source)
            running.request(key, running.receiver.room(PROMPT_TOKENS))
        running.wait_outcome(running.sender, 2)
        pages = len(running.sender.page_bytes(source))

        def in_doubt() -> int:
            running.sender.poll()
            return len(running.sender.transceiver._in_doubt)

        wait_until(lambda: in_doubt() == 2, WAIT_SECONDS, "both attempts are in doubt")
        assert sum(running.sender.transceiver.quarantined_slots()) == pages
        Stuck.gives_up = True
        running.clock.now += 1.0
        source.close()
        wait_until(running.sender.is_empty, WAIT_SECONDS, "the transport let go, pages are back")


def test_source_let_go_without_done_frees_the_source_but_proves_nothing_to_the_receiver() -> None:
    LetsGo.failing = True
    with pair(LetsGo) as running:
        running.receiver.transceiver.on_channel_up(running.sender.worker)
        _, source, target = start_transfer(running)
        # What the transport does after it gave up a write: here, nothing; the notices of the test's copy are dropped.
        running.receiver.transceiver.on_notification = lambda notification: None  # type: ignore[method-assign]
        pages = len(running.receiver.page_bytes(target))
        assert isinstance(running.wait_outcome(running.receiver).error, TransferError)
        source.close()
        target.close()
        wait_until(running.sender.is_empty, WAIT_SECONDS, "the source is free")
        running.clock.now += SETTLE_SECONDS + 1.0
        wait_until(lambda: total_quarantined(running) == pages, WAIT_SECONDS, "the target is in quarantine")
        # Asking again does not help: the sender let go of this attempt's writes without seeing them done.
        running.receiver.transceiver.on_channel_up(running.sender.worker)
        wait_until(lambda: len(results(running)) >= 2, WAIT_SECONDS, "the sender answered again")
        assert {result.quiet for result in results(running)} == {False}
        assert total_quarantined(running) == pages


def test_answer_to_a_repeated_cancel_ends_the_doubt() -> None:
    with pair() as running:
        running.sender.bend = lose(TransferResult)
        running.receiver.transceiver.on_notification = lambda notification: None  # type: ignore[method-assign]
        _, source, target = start_transfer(running)
        running.wait_outcome(running.sender)
        running.receiver.transceiver.on_channel_lost(running.sender.worker, "stream broke")
        assert isinstance(running.wait_outcome(running.receiver).error, PeerLost)
        target.close()
        source.close()
        wait_until(lambda: total_quarantined(running) > 0, WAIT_SECONDS, "pages are in quarantine")
        running.sender.bend = lambda message: message
        running.receiver.transceiver.on_channel_up(running.sender.worker)
        wait_until(running.receiver.is_empty, WAIT_SECONDS, "the sender says that all its writes were done")


def test_good_result_that_came_before_a_timeout_is_proof_when_it_passes() -> None:
    with pair() as running:
        running.receiver.transceiver.on_notification = lambda notification: None  # type: ignore[method-assign]
        _, _, target = start_transfer(running, timeout=5.0)
        wait_until(lambda: results(running), WAIT_SECONDS, "the sender's result")
        running.clock.now += 6.0
        assert isinstance(running.wait_outcome(running.receiver).error, TransferTimeout)
        target.close()
        wait_until(running.receiver.is_empty, WAIT_SECONDS, "the sender's word was kept")


def test_write_that_ends_while_its_attempt_is_abandoned_leaves_nothing_in_doubt() -> None:
    Slow.over = False
    with pair(Slow) as running:
        running.receiver.transceiver.on_notification = lambda notification: None  # type: ignore[method-assign]
        _, source, target = start_transfer(running)
        sender = running.sender.transceiver
        wait_until(lambda: sender._driver.busy, WAIT_SECONDS, "the write is under way")
        sender.abandon("shutting down").result(WAIT_SECONDS)
        assert sender.num_unanswered().result(WAIT_SECONDS) == 1
        assert isinstance(running.wait_outcome(running.receiver).error, PeerLost)
        Slow.over = True
        running.clock.now += 1.0
        wait_until(lambda: sender.num_unanswered().result(WAIT_SECONDS) == 0, WAIT_SECONDS, "the write is over")
        source.close()
        target.close()
        wait_until(running.receiver.is_empty, WAIT_SECONDS, "the sender's second answer is the proof")


def test_undelivered_write_of_one_attempt_says_nothing_of_others_to_the_same_receiver() -> None:
    LetsGo.failing = True
    with pair(LetsGo) as running:
        start_transfer(running)
        running.wait_outcome(running.sender)
        sweep(running)
        expired, key = running.receiver.room(PROMPT_TOKENS), running.key()
        running.request(key, expired)
        wait_until(lambda: any(result.key == key for result in results(running)), WAIT_SECONDS, "it was answered")
        assert {result.quiet for result in results(running) if result.key == key} == {True}
        assert {result.quiet for result in results(running) if result.key != key} == {False}


def test_abandon_tells_the_peer_and_leaves_nothing_in_doubt() -> None:
    with pair() as running:
        running.receiver.bend = lose(Grant)
        _, source, target = start_transfer(running)
        running.receiver.transceiver.abandon("shutting down").result(WAIT_SECONDS)
        assert isinstance(running.wait_outcome(running.receiver).error, PeerLost)
        assert isinstance(running.wait_outcome(running.sender).error, PeerLost)
        source.close()
        target.close()
        wait_until(running.receiver.is_empty, WAIT_SECONDS, "the sender says that nothing was written")


def test_undelivered_write_is_remembered_while_its_receiver_is_away() -> None:
    LetsGo.failing = True
    with pair(LetsGo) as running:
        transceiver, info = running.sender.transceiver, running.receiver.transceiver.info
        running.receiver.transceiver.on_notification = lambda notification: None  # type: ignore[method-assign]
        first, _, _ = start_transfer(running)
        running.wait_outcome(running.sender)
        transceiver.pair(info).result(WAIT_SECONDS)
        # A second write fails just when the receiver was away for so long that it is forgotten.
        transceiver._transport.poll = lambda post: PostState.IN_PROGRESS  # type: ignore[method-assign]
        transceiver._transport.release = lambda post: False  # type: ignore[method-assign]
        start_transfer(running)
        wait_until(lambda: transceiver._driver.busy, WAIT_SECONDS, "the second write is under way")
        transceiver._reactor.call(lambda: transceiver._peers.forget(info.worker)).result(WAIT_SECONDS)
        del transceiver._transport.release
        del transceiver._transport.poll
        running.wait_outcome(running.sender, 2)
        transceiver.pair(info).result(WAIT_SECONDS)
        answered = len(results(running))
        running.receiver.transceiver.on_channel_up(running.sender.worker)
        wait_until(lambda: len(results(running)) >= answered + 2, WAIT_SECONDS, "both are asked about again")
        assert {result.quiet for result in results(running) if result.key == first} == {False}


def test_lost_answer_is_asked_for_again_while_the_pages_are_in_doubt() -> None:
    with pair() as running:
        running.sender.bend = lose(TransferResult)
        running.receiver.transceiver.on_notification = lambda notification: None  # type: ignore[method-assign]
        _, source, target = start_transfer(running, timeout=5.0)
        running.wait_outcome(running.sender)
        running.clock.now += 6.0
        assert isinstance(running.wait_outcome(running.receiver).error, TransferTimeout)
        running.clock.now += SETTLE_SECONDS + 1.0
        wait_until(lambda: total_quarantined(running) > 0, WAIT_SECONDS, "pages are in quarantine")
        running.sender.bend = lambda message: message
        target.close()
        source.close()
        running.clock.now += SETTLE_SECONDS + 1.0
        wait_until(running.receiver.is_empty, WAIT_SECONDS, "the sender was asked again, and answered")


def test_quiet_word_that_repeats_the_end_of_a_good_transfer_settles_a_cancelled_one() -> None:
    with pair() as running:
        running.sender.bend = lambda message: (
            dataclasses.replace(message, quiet=False) if isinstance(message, TransferResult) else message
        )
        running.receiver.transceiver.on_notification = lambda notification: None  # type: ignore[method-assign]
        key, source, target = start_transfer(running)
        running.wait_outcome(running.sender)
        running.receiver.transceiver.cancel(key, "not wanted")
        assert isinstance(running.wait_outcome(running.receiver).error, TransferCancelled)
        running.sender.bend = lambda message: message
        source.close()
        target.close()
        running.clock.now += SETTLE_SECONDS + 1.0
        sweep(running)
        running.clock.now += SETTLE_SECONDS + 1.0
        wait_until(running.receiver.is_empty, WAIT_SECONDS, "asked again, the sender says that it is quiet")
