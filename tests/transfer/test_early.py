"""What comes before its time: grants before the prompt is computed, cancels before the attempt exists."""

import pytest

from kvferry.cache.errors import PeerLost, TransferCancelled, TransferError, TransferTimeout
from kvferry.transfer.ended import EndedAttempts
from kvferry.transfer.outcomes import cancelled
from kvferry.transfer.types import Direction, Grant, TransferKey
from tests.helpers import wait_until
from tests.transfer.bending import lose, sweep, total_quarantined
from tests.transfer.pairs import PROMPT_TOKENS, WAIT_SECONDS, Pair, aux_of, pair


def granted_first(running: Pair, timeout: float = 60.0) -> TransferKey:
    """A receiver that grants a prompt nobody has computed yet."""
    key = running.key()
    running.request(key, running.receiver.room(PROMPT_TOKENS), timeout=timeout, early=True)
    wait_until(lambda: any(isinstance(m, Grant) for m in running.receiver.sent), WAIT_SECONDS, "the grant left")
    sweep(running)
    return key


def test_early_grant_is_served_when_the_prompt_is_offered(direction: Direction) -> None:
    with pair(direction=direction) as running:
        key = granted_first(running)
        assert running.receiver.poll() == running.sender.poll() == []
        source = running.sender.fill(PROMPT_TOKENS)
        running.offer(key, source)
        outcome = running.wait_outcome(running.receiver)
        assert (outcome.error, outcome.aux) == (None, aux_of(PROMPT_TOKENS))
        assert running.wait_outcome(running.sender).error is None
        source.close()
        assert running.sender.is_empty()


def test_grant_that_is_not_early_is_refused_when_nothing_is_offered(direction: Direction) -> None:
    with pair(direction=direction) as running:
        key = running.key()
        running.request(key, running.receiver.room(PROMPT_TOKENS))
        assert "unknown here" in str(running.wait_outcome(running.receiver).error)


def test_early_grant_whose_prompt_never_comes_times_out_on_both_sides(direction: Direction) -> None:
    with pair(direction=direction) as running:
        key = granted_first(running, timeout=5.0)
        running.clock.now += 6.0
        assert isinstance(running.wait_outcome(running.receiver).error, TransferTimeout)
        assert isinstance(running.wait_outcome(running.sender).error, TransferTimeout)
        source = running.sender.fill(PROMPT_TOKENS)
        running.offer(key, source)
        assert isinstance(running.wait_outcome(running.sender, 2).error, TransferTimeout)
        source.close()
        assert running.sender.is_empty()


def test_early_grant_for_another_prompt_fails_before_anything_moves(direction: Direction) -> None:
    with pair(direction=direction) as running:
        key = granted_first(running)
        running.offer(key, running.sender.fill(20), 20)
        for end in (running.receiver, running.sender):
            error = running.wait_outcome(end).error
            assert isinstance(error, TransferError)
            assert "of 30 tokens, computed was prompt" in str(error)
        wait_until(lambda: total_quarantined(running) == 0, WAIT_SECONDS, "nothing was exposed for good")


def test_early_grant_for_another_request_fails_before_anything_moves(direction: Direction) -> None:
    with pair(direction=direction) as running:
        key = granted_first(running)
        running.offer(key, running.sender.fill(PROMPT_TOKENS), request_id="other")
        assert "computed was 'other'" in str(running.wait_outcome(running.receiver).error)


def test_failed_prefill_is_told_to_a_receiver_that_granted_early(direction: Direction) -> None:
    with pair(direction=direction) as running:
        key = granted_first(running)
        running.sender.transceiver.cancel(key, "the prompt is too long")
        error = running.wait_outcome(running.receiver).error
        assert isinstance(error, TransferCancelled)
        assert "the prompt is too long" in str(error)
        assert isinstance(running.wait_outcome(running.sender).error, TransferCancelled)


def test_offer_after_its_early_receiver_was_lost_ends_at_once(direction: Direction) -> None:
    with pair(direction=direction) as running:
        key = granted_first(running)
        running.sender.transceiver.on_channel_lost(running.receiver.worker, "stream broke")
        assert isinstance(running.wait_outcome(running.sender).error, PeerLost)
        source = running.sender.fill(PROMPT_TOKENS)
        running.offer(key, source)
        assert isinstance(running.wait_outcome(running.sender, 2).error, PeerLost)
        source.close()
        assert running.sender.is_empty()


def test_cancel_before_the_offer_ends_it_when_it_comes() -> None:
    with pair() as running:
        key = running.key()
        running.sender.transceiver.cancel(key, "gone before it began")
        source = running.sender.fill(PROMPT_TOKENS)
        running.offer(key, source)
        error = running.wait_outcome(running.sender).error
        assert isinstance(error, TransferCancelled)
        assert "gone before it began" in str(error)
        source.close()
        assert running.sender.is_empty()


@pytest.mark.parametrize("enlisted", [True, False])
def test_cancel_before_the_request_ends_it_when_it_comes_and_nothing_is_granted(enlisted: bool) -> None:
    with pair() as running:
        key, target = running.key(), running.receiver.room(PROMPT_TOKENS)
        running.receiver.transceiver.cancel(key, "gone before it began")
        if enlisted:
            running.receiver.transceiver.enlist(key, (running.sender.worker,), 60.0)
        running.request(key, target)
        assert isinstance(running.wait_outcome(running.receiver).error, TransferCancelled)
        assert not any(isinstance(message, Grant) for message in running.receiver.sent)
        target.close()
        wait_until(running.receiver.is_empty, WAIT_SECONDS, "nothing was granted")
        assert len(running.receiver.poll()) == 1


def test_queued_receiver_hears_of_the_end_before_it_has_pages() -> None:
    with pair() as running:
        key, source = running.key(), running.sender.fill(PROMPT_TOKENS)
        running.offer(key, source)
        running.receiver.transceiver.enlist(key, (running.sender.worker,), 60.0)
        running.clock.now += 4.0
        sweep(running)
        running.sender.transceiver.cancel(key, "not wanted")
        assert isinstance(running.wait_outcome(running.receiver).error, TransferCancelled)
        target = running.receiver.room(PROMPT_TOKENS)
        running.request(key, target)
        assert isinstance(running.wait_outcome(running.receiver, 2).error, TransferCancelled)
        target.close()
        wait_until(running.receiver.is_empty, WAIT_SECONDS, "nothing was granted")


def test_served_key_is_refused_on_both_sides() -> None:
    with pair() as running:
        key, source = running.key(), running.sender.fill(PROMPT_TOKENS)
        running.offer(key, source)
        running.request(key, running.receiver.room(PROMPT_TOKENS))
        assert running.wait_outcome(running.receiver).error is None
        assert running.wait_outcome(running.sender).error is None
        running.request(key, running.receiver.room(PROMPT_TOKENS))
        assert "was received here already" in str(running.wait_outcome(running.receiver, 2).error)
        running.offer(key, source)
        assert "was served already" in str(running.wait_outcome(running.sender, 2).error)


def test_served_key_is_refused_by_the_sender_when_the_receiver_forgot_it() -> None:
    with pair(max_remembered=0) as running:
        key, source = running.key(), running.sender.fill(PROMPT_TOKENS)
        running.offer(key, source)
        running.request(key, running.receiver.room(PROMPT_TOKENS))
        assert running.wait_outcome(running.receiver).error is None
        running.request(key, running.receiver.room(PROMPT_TOKENS))
        assert "unknown here" in str(running.wait_outcome(running.receiver, 2).error)


def test_lost_early_cancel_is_made_good_by_the_next() -> None:
    with pair() as running:
        running.receiver.bend = lose(Grant)
        key = running.key()
        running.request(key, running.receiver.room(PROMPT_TOKENS), early=True)
        running.receiver.transceiver.cancel(key, "first")
        running.receiver.transceiver.cancel(key, "second")
        assert "first" in str(running.wait_outcome(running.receiver).error)
        assert len(running.receiver.poll()) == 1


def test_memory_of_ended_attempts_is_bounded_and_keeps_the_first_reason() -> None:
    ended = EndedAttempts(limit=2)
    keys = [TransferKey(f"{index:032x}", 1) for index in range(3)]
    for key in keys:
        ended.remember(key, cancelled(f"why {key}"))
    ended.remember(keys[2], cancelled("again"))
    assert len(ended) == 2
    assert ended.find(keys[0]) is None
    assert ended.find(keys[2]) == cancelled(f"why {keys[2]}")
