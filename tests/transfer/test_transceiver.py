"""The whole transfer side in one process: real transports, real threads, a control plane that can be bent."""

import dataclasses
import itertools
import threading

import numpy as np
import pytest

from kvferry.cache.errors import (
    CapacityError,
    ConfigError,
    IncompatiblePeer,
    PeerLost,
    TransferCancelled,
    TransferError,
    TransferTimeout,
    TransportError,
)
from kvferry.cache.sequence import SequenceCache
from kvferry.transfer.peers import FORGET_SECONDS
from kvferry.transfer.receiving import SETTLE_SECONDS
from kvferry.transfer.session import Side
from kvferry.transfer.transport.base import Post, PostState
from kvferry.transfer.transport.loopback import LoopbackTransport
from kvferry.transfer.types import Cancel, Grant, PromptId, TransferKey, TransferResult, WorkerId
from tests.helpers import wait_until
from tests.transfer.pairs import PROMPT_TOKENS, WAIT_SECONDS, End, Message, Pair, aux_of, pair, prompt_of


def lose(kind: type) -> "object":
    return lambda message: None if isinstance(message, kind) else message


def total_quarantined(running: Pair) -> int:
    running.receiver.poll()
    return sum(running.receiver.transceiver.quarantined_slots())


@pytest.mark.parametrize("tokens", [1, 3, 4, 5, 8, 9, 15, 16, 30, 64])
def test_pages_arrive_byte_for_byte_and_everything_is_free_afterwards(tokens: int) -> None:
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


def test_neighbouring_slots_become_one_descriptor() -> None:
    with pair() as running:
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


def test_source_sequence_may_close_while_its_pages_are_offered() -> None:
    with pair() as running:
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


def test_large_transfer_is_cut_into_slices_and_completes_after_the_last() -> None:
    with pair(slice_bytes=2 * 1024) as running:
        source, target, key = running.sender.fill(64), running.receiver.room(64), running.key()
        running.offer(key, source, 64)
        running.request(key, target, 64)
        outcome = running.wait_outcome(running.receiver)
        assert outcome.wire.num_slices > 3
        assert running.receiver.page_bytes(target) == running.sender.page_bytes(source)


def test_many_transfers_at_once_do_not_mix() -> None:
    with pair(num_slots=256, slice_bytes=1024) as running:
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


def test_grant_for_an_unknown_transfer_fails_and_frees_the_pages() -> None:
    with pair() as running:
        target = running.receiver.room(PROMPT_TOKENS)
        running.request(running.key(), target)
        error = running.wait_outcome(running.receiver).error
        assert isinstance(error, TransferError)
        assert "expired, cancelled or never offered" in str(error)
        target.close()
        assert running.receiver.is_empty()


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


def paired_names(running: Pair, end: End) -> set[str]:
    return {worker.name for worker in end.transceiver.lanes().result(WAIT_SECONDS)}


def test_peer_whose_channels_are_all_lost_is_forgotten_and_can_pair_again() -> None:
    with pair() as running:
        transceiver, peer = running.sender.transceiver, running.receiver.transceiver.info
        for _ in range(2):
            transceiver.on_channel_up(peer.worker)
        transceiver.on_channel_lost(peer.worker, "one of two")
        running.clock.now += 1.0
        assert paired_names(running, running.sender) == {"d"}
        transceiver.on_channel_lost(peer.worker, "the other")
        sweep(running)
        running.clock.now += FORGET_SECONDS - 1.0
        sweep(running)
        assert paired_names(running, running.sender) == {"d"}
        running.clock.now += 2.0
        wait_until(lambda: not paired_names(running, running.sender), WAIT_SECONDS, "the peer is forgotten")
        transceiver.pair(peer).result(WAIT_SECONDS)
        source, target, key = running.sender.fill(PROMPT_TOKENS), running.receiver.room(PROMPT_TOKENS), running.key()
        running.offer(key, source)
        running.request(key, target)
        assert running.wait_outcome(running.receiver).error is None


def sweep(running: Pair) -> None:
    """Let both reactors do what is due by now: a turn begins after each of these answers."""
    for end in (running.sender, running.receiver):
        for _ in range(2):
            end.transceiver.lanes().result(WAIT_SECONDS)


def test_peer_that_pairs_again_before_an_old_loss_is_noticed_is_not_forgotten() -> None:
    with pair() as running:
        transceiver, peer = running.sender.transceiver, running.receiver.transceiver.info
        transceiver.on_channel_up(peer.worker)
        transceiver.on_channel_lost(peer.worker, "broke")
        transceiver.pair(peer).result(WAIT_SECONDS)
        transceiver.on_channel_up(peer.worker)
        running.clock.now += 10 * FORGET_SECONDS
        sweep(running)
        assert paired_names(running, running.sender) == {"d"}


def test_new_incarnation_replaces_the_old_even_while_a_write_to_it_is_stuck() -> None:
    Stuck.gives_up = False
    with pair(Stuck) as running:
        source, target, key = running.sender.fill(PROMPT_TOKENS), running.receiver.room(PROMPT_TOKENS), running.key()
        running.offer(key, source)
        running.request(key, target)
        running.wait_outcome(running.sender)
        old = running.receiver.transceiver.info
        reborn = Stuck("d-reborn")
        reborn.register(running.receiver.manager.storage.pools)
        info = dataclasses.replace(
            old,
            worker=dataclasses.replace(old.worker, incarnation=999),
            agent_name="d-reborn",
            agent_metadata=reborn.metadata(),
        )
        running.sender.transceiver.pair(info).result(WAIT_SECONDS)
        Stuck.gives_up = True
        running.clock.now += 1.0
        source.close()
        wait_until(running.sender.is_empty, WAIT_SECONDS, "the old write was let go")
        assert running.sender.transceiver.failure is None
        reborn.close()


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


class Stuck(LoopbackTransport):
    """Posts fail, and the handle is given up only when the test says so."""

    gives_up = False

    def poll(self, post: Post) -> PostState:
        super().poll(post)
        return PostState.FAILED

    def release(self, post: Post) -> bool:
        return type(self).gives_up and super().release(post)


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


def test_result_with_other_epochs_is_refused() -> None:
    def age(message: Message) -> Message:
        if isinstance(message, TransferResult):
            older = tuple(np.zeros_like(np.frombuffer(e, np.uint32)).tobytes() for e in message.epochs)
            return dataclasses.replace(message, epochs=older)
        return message

    check_refused_result(age, "another life of the pages")


def test_result_from_another_life_of_the_sender_is_refused() -> None:
    def reincarnate(message: Message) -> Message:
        if isinstance(message, TransferResult):
            return dataclasses.replace(message, sender=dataclasses.replace(message.sender, incarnation=1))
        return message

    check_refused_result(reincarnate, "p#1")


def test_result_without_a_first_token_is_refused() -> None:
    def strip(message: Message) -> Message:
        return dataclasses.replace(message, aux=None) if isinstance(message, TransferResult) else message

    check_refused_result(strip, "exactly one first token")


def check_refused_result(bend: "object", story: str) -> None:
    with pair() as running:
        running.sender.bend = bend  # type: ignore[assignment]
        source, target, key = running.sender.fill(PROMPT_TOKENS), running.receiver.room(PROMPT_TOKENS), running.key()
        running.offer(key, source)
        running.request(key, target)
        error = running.wait_outcome(running.receiver).error
        assert isinstance(error, TransferError)
        assert story in str(error)
        assert running.receiver.outcomes[0].aux is None


@pytest.mark.parametrize(
    "change, story",
    [
        (lambda grant, worker: dataclasses.replace(grant, prompt=prompt_of(29)), "of 29 tokens, computed was prompt"),
        (
            lambda grant, worker: dataclasses.replace(grant, prompt=PromptId.of([7] * 30)),
            "of 30 tokens, computed was prompt",
        ),
        (
            lambda grant, worker: dataclasses.replace(grant, sender=dataclasses.replace(worker, incarnation=5)),
            "grant names sender p#5",
        ),
        (
            lambda grant, worker: dataclasses.replace(
                grant, pages=grant.pages._replace(slots=tuple(slots + 64 for slots in grant.pages.slots))
            ),
            "of 64",
        ),
    ],
    ids=["prompt length", "other prompt", "sender incarnation", "slot out of range"],
)
def test_grant_that_does_not_fit_is_refused_before_any_write(change: "object", story: str) -> None:
    with pair() as running:
        worker = running.sender.worker
        running.receiver.bend = lambda m: change(m, worker) if isinstance(m, Grant) else m  # type: ignore[operator]
        source, target, key = running.sender.fill(PROMPT_TOKENS), running.receiver.room(PROMPT_TOKENS), running.key()
        running.offer(key, source)
        running.request(key, target)
        assert story in str(running.wait_outcome(running.receiver).error)
        assert all(content == bytes(len(content)) for content in running.receiver.page_bytes(target))
        target.close()
        wait_until(running.receiver.is_empty, WAIT_SECONDS, "a refused grant is proof of quiet")


def test_receiver_that_wants_a_page_the_sender_has_not_is_refused() -> None:
    with pair() as running:
        source, key = running.sender.fill(PROMPT_TOKENS), running.key()
        # History below the prompt: the window reaches further back than the sender's pages do.
        target = running.receiver.sequence()
        target.resize(capacity=PROMPT_TOKENS, history=0)
        running.offer(key, source)
        running.request(key, target)
        assert "no page for blocks" in str(running.wait_outcome(running.receiver).error)


def test_foreign_and_late_notifications_change_nothing() -> None:
    with pair() as running:
        source, target, key = running.sender.fill(PROMPT_TOKENS), running.receiver.room(PROMPT_TOKENS), running.key()
        running.offer(key, source)
        running.request(key, target)
        running.wait_outcome(running.receiver)
        running.wait_outcome(running.sender)
        replayed = next(message for message in running.receiver.sent if isinstance(message, Grant))
        running.sender.transceiver.on_grant(running.receiver.worker, replayed)
        failed = [m for m in running.sender.sent if isinstance(m, TransferResult)]
        wait_until(
            lambda: len([m for m in running.sender.sent if isinstance(m, TransferResult)]) == 2, 5.0, "an answer"
        )
        assert failed[0].aux == aux_of(PROMPT_TOKENS)
        assert running.receiver.poll() == running.receiver.outcomes
        assert len(running.receiver.outcomes) == 1


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


def test_pairing_with_another_model_lists_the_difference() -> None:
    with pair() as running:
        other = dataclasses.replace(running.receiver.transceiver.info, model_digest="other")
        with pytest.raises(IncompatiblePeer) as caught:
            running.sender.transceiver.pair(other).result(WAIT_SECONDS)
        assert [reason.field for reason in caught.value.reasons] == ["model_digest"]


def test_cancel_message_for_an_unknown_transfer_is_ignored() -> None:
    with pair() as running:
        running.sender.transceiver.on_cancel(
            running.receiver.worker, Cancel(running.key(), running.receiver.worker, "never heard of it")
        )
        source, target, key = running.sender.fill(PROMPT_TOKENS), running.receiver.room(PROMPT_TOKENS), running.key()
        running.offer(key, source)
        running.request(key, target)
        assert running.wait_outcome(running.receiver).error is None


class LetsGo(LoopbackTransport):
    """Writes that fail after they were handed over: the source is let go, the bytes may still be on their way."""

    failing = True

    def poll(self, post: Post) -> PostState:
        state = super().poll(post)
        return PostState.FAILED if type(self).failing else state


def start_transfer(running: Pair, **limits: float) -> tuple[TransferKey, SequenceCache, SequenceCache]:
    source, target, key = running.sender.fill(PROMPT_TOKENS), running.receiver.room(PROMPT_TOKENS), running.key()
    running.offer(key, source)
    running.request(key, target, **limits)
    return key, source, target


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
        wait_until(lambda: len(results(running)) == 2, WAIT_SECONDS, "the sender answered again")
        assert [result.quiet for result in results(running)] == [False, False]
        assert total_quarantined(running) == pages


def results(running: Pair) -> list[TransferResult]:
    return [message for message in running.sender.sent if isinstance(message, TransferResult)]


def test_failed_write_hangs_up_and_the_next_pairing_wires_the_lane_again() -> None:
    LetsGo.failing = True
    with pair(LetsGo) as running:
        start_transfer(running)
        running.wait_outcome(running.sender)
        wait_until(lambda: running.sender.hung_up, WAIT_SECONDS, "the control plane is asked to close the channel")
        assert running.sender.hung_up[0][0] == running.receiver.worker
        LetsGo.failing = False
        running.sender.transceiver.pair(running.receiver.transceiver.info).result(WAIT_SECONDS)
        key, _, _ = start_transfer(running)
        wait_until(
            lambda: any(o.key == key and o.error is None for o in running.receiver.poll()),
            WAIT_SECONDS,
            "it works again",
        )
        running.clock.now += 1.0


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


def test_key_that_is_open_already_is_refused_and_the_first_attempt_goes_on() -> None:
    with pair() as running:
        held: list[Message] = []
        running.receiver.bend = lambda message: held.append(message)
        key, _, _ = start_transfer(running)
        again = running.receiver.room(PROMPT_TOKENS)
        with pytest.raises(ConfigError, match="serves one attempt"):
            running.request(key, again)
        again.close()
        wait_until(lambda: held, WAIT_SECONDS, "the grant is under way")
        assert isinstance(held[0], Grant)
        running.sender.transceiver.on_grant(running.receiver.worker, held[0])
        assert running.wait_outcome(running.receiver).error is None


@pytest.mark.parametrize(
    "change, story",
    [
        (lambda r: dataclasses.replace(r, wire=dataclasses.replace(r.wire, num_slices=0, num_pages=0)), "0 pages in 0"),
        (lambda r: dataclasses.replace(r, wire=dataclasses.replace(r.wire, num_pages=3)), "accounts for 3 pages"),
        (lambda r: dataclasses.replace(r, wire=dataclasses.replace(r.wire, num_slices=0)), "in 0 slices"),
        (lambda r: dataclasses.replace(r, aux=aux_of(7)), "7 prompt tokens, granted was"),
        (
            lambda r: dataclasses.replace(r, aux=dataclasses.replace(r.aux, first_tokens=(1, 2))),
            "exactly one first token",
        ),
        (
            lambda r: dataclasses.replace(r, aux=dataclasses.replace(r.aux, draft_tokens=(1,))),
            "exactly one first token",
        ),
    ],
    ids=["nothing written", "fewer pages", "no slices", "other prompt", "two tokens", "draft tokens"],
)
def test_good_result_must_account_for_every_page_and_one_token(change: "object", story: str) -> None:
    check_refused_result(
        lambda m: change(m) if isinstance(m, TransferResult) and m.aux else m,  # type: ignore[operator]
        story,
    )


def test_cancel_from_a_stranger_does_not_stop_a_granted_transfer() -> None:
    Slow.over = False
    with pair(Slow) as running:
        key, _, _ = start_transfer(running)
        wait_until(lambda: running.receiver.sent, WAIT_SECONDS, "the grant was delivered")
        stranger = WorkerId("stranger", 1)
        running.sender.transceiver.on_cancel(stranger, Cancel(key, stranger, "mischief"))
        sweep(running)
        assert running.sender.poll() == []
        Slow.over = True
        assert running.wait_outcome(running.receiver).error is None


class Slow(LoopbackTransport):
    """Writes are under way until the test says that they are over, and cannot be taken back before."""

    over = False

    def poll(self, post: Post) -> PostState:
        state = super().poll(post)
        return state if type(self).over else PostState.IN_PROGRESS

    def release(self, post: Post) -> bool:
        return type(self).over and super().release(post)


def test_write_that_ends_while_its_attempt_is_abandoned_leaves_nothing_in_doubt() -> None:
    Slow.over = False
    with pair(Slow) as running:
        running.receiver.transceiver.on_notification = lambda notification: None  # type: ignore[method-assign]
        _, source, target = start_transfer(running)
        sender = running.sender.transceiver
        wait_until(lambda: sender._sender.writer.busy, WAIT_SECONDS, "the write is under way")
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


def test_cancel_while_the_grant_waits_for_the_device_sends_no_grant() -> None:
    with pair() as running:
        ready: list[bool] = []
        running.receiver.manager.storage.record_event = lambda: lambda: bool(ready)  # type: ignore[method-assign]
        key, _, target = start_transfer(running)
        running.receiver.transceiver.cancel(key, "not wanted")
        assert isinstance(running.wait_outcome(running.receiver).error, TransferCancelled)
        ready.append(True)
        sweep(running)
        assert running.receiver.sent == []
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
        assert [usage.held for usage in running.receiver.manager.usage()] == [0]


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


def test_abandon_tells_the_peer_and_leaves_nothing_in_doubt() -> None:
    with pair() as running:
        running.receiver.bend = lose(Grant)
        _, source, target = start_transfer(running)
        running.receiver.transceiver.abandon("shutting down").result(WAIT_SECONDS)
        assert isinstance(running.wait_outcome(running.receiver).error, PeerLost)
        assert isinstance(running.wait_outcome(running.sender).error, TransferCancelled)
        source.close()
        target.close()
        wait_until(running.receiver.is_empty, WAIT_SECONDS, "the sender says that nothing was written")
