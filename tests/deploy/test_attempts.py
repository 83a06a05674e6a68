"""Requests and their attempts end together, on both workers, whichever end began it."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from kvferry.cache.errors import (
    CapacityError,
    ConfigError,
    DeadlineExceeded,
    KVError,
    TransferCancelled,
    TransferError,
    TransferTimeout,
)
from kvferry.deploy.requests import Request
from kvferry.transfer.inference import PrefillReply
from kvferry.transfer.outcomes import TransferOutcome
from kvferry.transfer.types import (
    Cancel,
    Direction,
    Grant,
    Message,
    Renewal,
    Side,
    TransferKey,
    WireReport,
)
from tests.deploy.loops import WAIT_SECONDS, Node, Sink, new_key, nodes
from tests.helpers import wait_until

BUSY = {"max_running": 1, "max_seq_len_tokens": 4100}
"""One long request keeps the decode node busy for longer than a test takes."""


def offered(prefill: Node, tokens: int = 30, **options: int) -> tuple[Request, PrefillReply]:
    request = prefill.request(tokens, hand_over=True, **options)
    return request, prefill.submit(request).wait().reply


@contextmanager
def full(prefill: Node, decode: Node) -> Iterator[None]:
    """The decode node, whose max_running is 1, is busy; what comes waits in its queue."""
    busy = decode.request(8, 4000)
    sink = decode.submit(busy)
    wait_until(lambda: sink.tokens, WAIT_SECONDS, "it is busy")
    yield
    busy.cancelled.set()
    decode.loop.wake()
    assert isinstance(sink.wait().error, TransferCancelled)


def queued(decode: Node, request: Request) -> Sink:
    """Submit a request and see it in the queue."""
    sink = decode.submit(request)
    wait_until(lambda: decode.loop.num_waiting, WAIT_SECONDS, "it waits")
    return sink


def stop_by_caller(decode: Node, request: Request) -> None:
    request.cancelled.set()
    decode.loop.wake()


def stop_by_key(decode: Node, request: Request) -> None:
    assert request.key is not None
    decode.loop.cancel(request.key, "the frontend says so")


def stop_by_deadline(decode: Node, request: Request) -> None:
    request.deadline = 0.0
    decode.loop.wake()


@pytest.mark.parametrize(
    "stop, kind",
    [(stop_by_caller, TransferCancelled), (stop_by_key, TransferCancelled), (stop_by_deadline, DeadlineExceeded)],
)
def test_request_that_ends_in_the_queue_frees_the_prompt_at_the_other_worker_at_once(
    stop: object, kind: type[KVError]
) -> None:
    with nodes(num_slots=1200, **BUSY) as (prefill, decode), full(prefill, decode):
        request, reply = offered(prefill)
        waiting = decode.fetch(request, reply)
        sink = queued(decode, waiting)
        assert not prefill.is_idle()
        stop(decode, waiting)  # type: ignore[operator]
        assert isinstance(sink.wait().error, kind)
        wait_until(prefill.is_idle, WAIT_SECONDS, "the prompt's pages are free")
        assert not [message for message in decode.end.sent if isinstance(message, Grant)]


def test_request_that_the_decode_worker_refuses_frees_the_prompt_at_once() -> None:
    with nodes(num_slots=200) as (prefill, decode):
        request, reply = offered(prefill)
        refused = decode.fetch(request, reply)
        refused.prompt = (384,)
        assert isinstance(decode.submit(refused).wait().error, ConfigError)
        wait_until(prefill.is_idle, WAIT_SECONDS, "the prompt's pages are free")


def test_failure_that_arrives_while_the_request_waits_for_pages_ends_it() -> None:
    with nodes(num_slots=1200, **BUSY, lease_seconds=1.0) as (prefill, decode), full(prefill, decode):
        request, reply = offered(prefill)
        sink = queued(decode, decode.fetch(request, reply))
        wait_until(lambda: any(isinstance(m, Renewal) for m in decode.end.sent), WAIT_SECONDS, "a sign of life")
        prefill.loop.cancel(reply.key, "pages are needed elsewhere")
        error = sink.wait().error
        assert isinstance(error, TransferCancelled)
        assert "pages are needed elsewhere" in str(error)


def test_renewals_keep_a_prompt_longer_than_it_is_held_for_nobody() -> None:
    with nodes(num_slots=1200, **BUSY, lease_seconds=0.6, hold_seconds=0.4) as (prefill, decode):
        with full(prefill, decode):
            request, reply = offered(prefill)
            sink = queued(decode, decode.fetch(request, reply))

            def renewals() -> int:
                return sum(isinstance(message, Renewal) for message in decode.end.sent)

            # The engine stands still meanwhile: renewals are not its work.
            decode.engine.gate.clear()
            wait_until(lambda: renewals() >= 6, WAIT_SECONDS, "more than the lease and the hold passed")
            assert not prefill.is_idle()
            decode.engine.gate.set()
        assert sink.wait().error is None
        assert reply.lease_seconds == 0.4


def test_key_that_stands_for_a_request_is_refused_for_another() -> None:
    with nodes(num_slots=1200, **BUSY) as (prefill, decode), full(prefill, decode):
        request, reply = offered(prefill)
        first = queued(decode, decode.fetch(request, reply))
        error = decode.submit(decode.fetch(request, reply)).wait().error
        assert isinstance(error, ConfigError)
        assert "a key serves one attempt" in str(error)
        assert not first.num_finished
        stop_by_key(decode, decode.fetch(request, reply))
        assert isinstance(first.wait().error, TransferCancelled)


@pytest.mark.parametrize("direction", Direction)
def test_pages_move_in_the_direction_that_the_receiver_wants(direction: Direction) -> None:
    with nodes(direction=direction) as (prefill, decode):
        request, reply = offered(prefill)
        sink = decode.submit(decode.fetch(request, reply)).wait()
        assert sink.error is None
        assert [m.direction for m in decode.end.sent if isinstance(m, Grant)] == [direction]
        assert sink.tokens == prefill.submit(prefill.request(30)).wait().tokens


# ---- generation first


@pytest.mark.parametrize("direction", Direction)
@pytest.mark.parametrize("decode_first", [True, False])
def test_tokens_are_the_same_whoever_is_asked_first(direction: Direction, decode_first: bool) -> None:
    with nodes(direction=direction) as (prefill, decode):
        request = prefill.request(33, 8, key=new_key())
        early = decode.expect(request, prefill.end.worker)
        if decode_first:
            moved = decode.submit(early)
            wait_until(lambda: grants(decode), WAIT_SECONDS, "the grant left")
            reply = prefill.submit(request).wait().reply
        else:
            reply = prefill.submit(request).wait().reply
            moved = decode.submit(early)
        assert reply.key == request.offer_key
        assert moved.wait().error is None
        assert moved.tokens == prefill.submit(prefill.request(33, 8)).wait().tokens
        sent = grants(decode)
        assert [(grant.early, grant.request_id) for grant in sent] == [(True, request.request_id)]


def grants(node: Node) -> list[Grant]:
    return [message for message in node.end.sent if isinstance(message, Grant)]


def granted_early(prefill: Node, decode: Node, request: Request) -> Sink:
    sink = decode.submit(decode.expect(request, prefill.end.worker))
    wait_until(lambda: grants(decode), WAIT_SECONDS, "the grant left")
    return sink


def test_prefill_that_is_refused_ends_the_request_that_granted_for_it() -> None:
    with nodes(num_slots=200) as (prefill, decode):
        request = prefill.request(30, key=new_key())
        early = granted_early(prefill, decode, request)
        request.prompt = (384,)
        refused = prefill.submit(request).wait().error
        assert isinstance(refused, ConfigError)
        error = early.wait().error
        assert isinstance(error, TransferError)
        assert error.phase == "admission"
        assert "[bad_request]" in str(error)
        assert "384" in str(error)


@pytest.mark.parametrize("stop", [stop_by_caller, stop_by_key, stop_by_deadline])
def test_prefill_that_ends_halfway_ends_the_request_that_granted_for_it(stop: object) -> None:
    with nodes(num_slots=200) as (prefill, decode):
        request = prefill.request(60, key=new_key())
        early = granted_early(prefill, decode, request)
        prefill.engine.gate.clear()
        sink = prefill.submit(request)
        wait_until(lambda: prefill.engine.at_gate, WAIT_SECONDS, "it computes")
        stop(prefill, request)  # type: ignore[operator]
        prefill.engine.gate.set()
        assert isinstance(sink.wait().error, TransferCancelled | DeadlineExceeded)
        error = early.wait().error
        assert isinstance(error, TransferCancelled | TransferTimeout)
        assert error.phase == "prefill"
        assert len(prefill.engine.computed) < 4


def test_prefill_stops_when_the_request_that_granted_for_it_ends() -> None:
    with nodes(num_slots=200) as (prefill, decode):
        request = prefill.request(60, key=new_key())
        early = granted_early(prefill, decode, request)
        prefill.engine.gate.clear()
        sink = prefill.submit(request)
        wait_until(lambda: prefill.engine.at_gate, WAIT_SECONDS, "it computes")
        stop_by_key(decode, request)
        assert isinstance(early.wait().error, TransferCancelled)
        wait_until(lambda: any(isinstance(m, Cancel) for m in decode.end.sent), WAIT_SECONDS, "the cancel left")
        prefill.engine.gate.set()
        assert isinstance(sink.wait().error, TransferCancelled)
        assert len(prefill.engine.computed) < 4


def test_prompt_of_a_request_that_was_cancelled_meanwhile_is_not_computed() -> None:
    with nodes(num_slots=200) as (prefill, decode):
        request = prefill.request(30, key=new_key())
        early = decode.expect(request, prefill.end.worker)
        sink = granted_early(prefill, decode, request)
        stop_by_caller(decode, early)
        stop_by_key(decode, early)
        assert isinstance(sink.wait().error, TransferCancelled)
        wait_until(lambda: any(isinstance(m, Cancel) for m in decode.end.sent), WAIT_SECONDS, "the cancel left")
        assert request.offer_key is not None
        key = request.offer_key
        wait_until(lambda: prefill.end.transceiver.why_ended(key), WAIT_SECONDS, "the cancel came")
        assert isinstance(prefill.submit(request).wait().error, TransferCancelled)
        assert not prefill.engine.computed


def test_cancel_that_comes_before_the_request_stops_it() -> None:
    with nodes(num_slots=200) as (prefill, decode):
        request = prefill.request(30, key=new_key())
        assert request.offer_key is not None
        decode.loop.cancel(request.offer_key, "it came first")
        error = decode.submit(decode.expect(request, prefill.end.worker)).wait().error
        assert isinstance(error, TransferCancelled)
        assert "it came first" in str(error)


def test_second_prefill_with_the_same_key_is_refused_and_the_first_goes_on() -> None:
    with nodes(num_slots=200) as (prefill, decode):
        request = prefill.request(30, key=new_key())
        reply = prefill.submit(request).wait().reply
        again = prefill.submit(prefill.request(30, key=request.offer_key)).wait().error
        assert isinstance(again, ConfigError)
        assert decode.submit(decode.fetch(request, reply)).wait().error is None


def test_early_request_whose_prefill_never_comes_ends_at_its_deadline() -> None:
    with nodes(num_slots=200) as (prefill, decode):
        request = prefill.request(30, key=new_key())
        error = decode.submit(decode.expect(request, prefill.end.worker, seconds=0.3)).wait().error
        assert isinstance(error, DeadlineExceeded | TransferTimeout)
        assert isinstance(error, KVError)


def test_early_request_outlives_the_limit_of_transfers_of_computed_prompts() -> None:
    with nodes(num_slots=200) as (prefill, decode):
        request = prefill.request(30, key=new_key())
        early = decode.expect(request, prefill.end.worker, seconds=55.0)
        sink = decode.submit(early)
        wait_until(lambda: grants(decode), WAIT_SECONDS, "the grant left")
        [grant] = grants(decode)
        assert 40.0 < grant.timeout_seconds <= 55.0
        stop_by_caller(decode, early)
        assert isinstance(sink.wait().error, TransferCancelled)


def test_unknown_sender_is_an_error_of_the_request() -> None:
    with nodes() as (prefill, decode):
        request = prefill.request(30, key=new_key())
        stranger = type(prefill.end.worker)("stranger", 7)
        error = decode.submit(decode.expect(request, stranger)).wait().error
        assert isinstance(error, TransferError)
        assert re.search("stranger#7 is not a paired peer", str(error))


def test_transfer_of_a_loop_that_has_no_room_for_more_is_refused_with_numbers() -> None:
    with nodes(num_slots=1200, max_waiting=1, **BUSY) as (prefill, decode), full(prefill, decode):
        requests = [offered(prefill) for _ in range(2)]
        sinks = [decode.submit(decode.fetch(*pair)) for pair in requests]
        error = sinks[1].wait().error
        assert isinstance(error, CapacityError)
        assert "max_waiting_requests" in str(error)
        wait_until(lambda: prefill.end.transceiver.num_sending == 1, WAIT_SECONDS, "the refused one's prompt is free")
        stop_by_key(decode, decode.fetch(*requests[0]))
        assert isinstance(sinks[0].wait().error, TransferCancelled)


def lost(messages: list[Message]) -> list[TransferKey]:
    return [message.key for message in messages if isinstance(message, Cancel)]


def test_success_cancels_nothing() -> None:
    with nodes() as (prefill, decode):
        request, reply = offered(prefill)
        assert decode.submit(decode.fetch(request, reply)).wait().error is None
        assert lost(decode.end.sent) == []


def test_end_of_a_foreign_attempt_under_the_same_key_does_not_end_a_request_that_receives() -> None:
    with nodes(num_slots=1200, **BUSY) as (prefill, decode), full(prefill, decode):
        request, reply = offered(prefill)
        sink = queued(decode, decode.fetch(request, reply))
        foreign = TransferOutcome(reply.key, Side.SENDER, None, WireReport(), 0.0)
        heard = decode.loop.call(lambda: decode.end.transceiver._outbox.put(foreign))
        heard.result(WAIT_SECONDS)
        decode.loop.call(lambda: None).result(WAIT_SECONDS)
        assert not sink.num_finished
        stop_by_key(decode, decode.fetch(request, reply))
        assert isinstance(sink.wait().error, TransferCancelled)
        wait_until(prefill.is_idle, WAIT_SECONDS, "the prompt's pages are free")
