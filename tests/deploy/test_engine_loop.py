"""Requests through the engine loop in every phase: served, refused, cancelled, late, broken."""

import re
from dataclasses import replace

import pytest
import torch

from kvferry.cache.errors import (
    CapacityError,
    ComputeError,
    ConfigError,
    DeadlineExceeded,
    InvariantError,
    TransferCancelled,
    TransferError,
    TransferTimeout,
    TransportError,
    Unavailable,
)
from kvferry.cache.holds import Access, Hold
from kvferry.cache.sequence import SequenceCache
from kvferry.transfer.types import TransferKey, TransferResult
from tests.deploy.loops import WAIT_SECONDS, hand_over, nodes
from tests.helpers import wait_until
from tests.transfer.pairs import Message


@pytest.mark.parametrize("prompt_tokens", [1, 4, 15, 16, 17, 33, 100])
def test_handed_over_tokens_equal_those_of_one_node(prompt_tokens: int) -> None:
    with nodes() as (prefill, decode):
        request = prefill.request(prompt_tokens, 12, hand_over=True)
        moved = hand_over(prefill, decode, request)
        alone = prefill.request(prompt_tokens, 12)
        assert moved.error is None
        assert moved.tokens == prefill.submit(alone).wait().tokens
        assert len(moved.tokens) == moved.summary.new_tokens == 12
        assert moved.summary.wire.num_pages > 0


def test_one_node_alone_serves_without_moving_anything() -> None:
    with nodes() as (prefill, _):
        sink = prefill.submit(prefill.request(50, 8)).wait()
        assert sink.error is None
        assert len(sink.tokens) == 8
        assert (sink.summary.wire.num_bytes, sink.summary.sender) == (0, prefill.end.worker)


def test_many_requests_share_the_loop_and_all_finish() -> None:
    with nodes(num_slots=120) as (prefill, decode):
        requests = [prefill.request(10 + 7 * index, 6, hand_over=True) for index in range(6)]
        sinks = [prefill.submit(request) for request in requests]
        fetched = [decode.submit(decode.fetch(r, s.wait().reply)) for r, s in zip(requests, sinks, strict=True)]
        assert all(len(sink.wait().tokens) == 6 for sink in fetched)


@pytest.mark.parametrize(
    "prompt_tokens, new_tokens, kind, story",
    [
        (0, 4, ConfigError, "prompt is empty"),
        (10, 0, ConfigError, "max_new_tokens is 0"),
        (390, 20, ConfigError, "exceed max_seq_len_tokens 400"),
        (300, 4, CapacityError, r"the pools have \[64\]"),
    ],
)
def test_request_that_cannot_be_served_is_refused_at_once(
    prompt_tokens: int, new_tokens: int, kind: type[Exception], story: str
) -> None:
    with nodes() as (prefill, _):
        error = prefill.submit(prefill.request(prompt_tokens, new_tokens, hand_over=True)).wait().error
        assert isinstance(error, kind)
        assert re.search(story, str(error))
        assert prefill.engine.num_forward == 0


def test_token_outside_the_vocabulary_is_refused() -> None:
    with nodes() as (prefill, _):
        request = prefill.request(4)
        request.prompt = (3, 384, -1)
        error = prefill.submit(request).wait().error
        assert isinstance(error, ConfigError)
        assert "[384, -1]" in str(error)


def test_more_requests_than_may_wait_are_refused() -> None:
    with nodes(max_waiting=2) as (prefill, _):
        prefill.engine.gate.clear()
        first = prefill.submit(prefill.request(60))
        wait_until(lambda: prefill.engine.num_forward, WAIT_SECONDS, "the first is being computed")
        sinks = [prefill.submit(prefill.request(10)) for _ in range(3)]
        prefill.engine.gate.set()
        errors = [sink.wait().error for sink in sinks]
        assert [type(error) for error in errors] == [type(None), CapacityError, CapacityError]
        assert first.wait().error is None


def test_cancel_while_waiting_and_while_computing() -> None:
    with nodes() as (prefill, _):
        prefill.engine.gate.clear()
        computing, waiting = prefill.request(60, hand_over=True), prefill.request(10, hand_over=True)
        sinks = [prefill.submit(request) for request in (computing, waiting)]
        wait_until(lambda: prefill.engine.num_forward, WAIT_SECONDS, "the first is being computed")
        for request in (computing, waiting):
            request.cancelled.set()
        prefill.engine.gate.set()
        assert all(isinstance(sink.wait().error, TransferCancelled) for sink in sinks)
        assert prefill.engine.num_forward == 1


def test_cancel_of_an_offered_prompt_frees_its_pages() -> None:
    with nodes() as (prefill, _):
        reply = prefill.submit(prefill.request(30, hand_over=True)).wait().reply
        assert not prefill.is_idle()
        prefill.loop.cancel(reply.key, "not wanted")
        prefill.loop.cancel(TransferKey("0" * 32, 1), "unknown")
        wait_until(prefill.is_idle, WAIT_SECONDS, "pages are free")


def test_cancel_while_receiving_and_while_decoding() -> None:
    with nodes(num_slots=200) as (prefill, decode):
        requests = [prefill.request(30, 300, hand_over=True) for _ in range(2)]
        replies = [prefill.submit(request).wait().reply for request in requests]
        decoding = decode.fetch(requests[0], replies[0])
        running = decode.submit(decoding)
        wait_until(lambda: len(running.tokens) > 2, WAIT_SECONDS, "it decodes")
        decode.engine.gate.clear()
        prefill.end.bend = lambda message: None if isinstance(message, TransferResult) else message
        receiving = decode.fetch(requests[1], replies[1])
        stuck = decode.submit(receiving)
        decode.engine.gate.set()
        wait_until(lambda: decode.end.transceiver.num_receiving, WAIT_SECONDS, "the grant is out")
        for request in (decoding, receiving):
            request.cancelled.set()
        decode.loop.wake()
        for sink in (running, stuck):
            assert isinstance(sink.wait().error, TransferCancelled)


def test_deadline_passes_in_every_phase() -> None:
    with nodes(num_slots=200) as (prefill, decode):
        late = prefill.submit(prefill.request(30, 300, seconds=0.0))
        assert isinstance(late.wait().error, DeadlineExceeded)
        request = prefill.request(30, 300, hand_over=True)
        reply = prefill.submit(request).wait().reply
        late = decode.fetch(request, reply)
        decoding = decode.submit(late)
        wait_until(lambda: decoding.tokens, WAIT_SECONDS, "it decodes")
        decode.engine.gate.clear()
        late.deadline = 0.0
        decode.engine.gate.set()
        assert isinstance(decoding.wait().error, DeadlineExceeded)
        assert 0 < len(decoding.tokens) < 300


def test_prompt_that_expired_is_unknown_to_the_decode_request() -> None:
    with nodes(hold_seconds=0.05) as (prefill, decode):
        request = prefill.request(30, hand_over=True)
        reply = prefill.submit(request).wait().reply
        wait_until(prefill.is_idle, WAIT_SECONDS, "the offer timed out")
        error = decode.submit(decode.fetch(request, reply)).wait().error
        assert isinstance(error, TransferError)
        # Either side may notice first: the sender that it does not know the transfer, or the receiver its own timeout.
        assert isinstance(error, TransferTimeout) or "[unknown_transfer]" in str(error)


def test_prefill_pauses_while_too_many_prompts_are_held() -> None:
    with nodes(max_held=1) as (prefill, decode):
        requests = [prefill.request(10, hand_over=True) for _ in range(2)]
        sinks = [prefill.submit(request) for request in requests]
        wait_until(lambda: sinks[0].num_finished, WAIT_SECONDS, "the first is offered")
        assert prefill.loop.call(lambda: prefill.engine.num_forward).result(WAIT_SECONDS) == 1
        for request, sink in zip(requests, sinks, strict=True):
            fetched = decode.submit(decode.fetch(request, sink.wait().reply))
            assert fetched.wait().error is None


def test_request_waits_for_pages_and_runs_when_they_are_free() -> None:
    # 64 slots: 100 tokens hold 25 blocks of full attention and the window's pages, so two fit and a third waits.
    with nodes() as (prefill, decode):
        requests = [prefill.request(100, 4, hand_over=True) for _ in range(3)]
        sinks = [prefill.submit(request) for request in requests]
        for request, sink in zip(requests, sinks, strict=True):
            fetched = decode.submit(decode.fetch(request, sink.wait().reply))
            assert fetched.wait().error is None


def test_wrong_bytes_stop_the_worker_instead_of_reaching_a_client() -> None:
    with nodes() as (prefill, decode):
        request = prefill.request(40, 4, hand_over=True)
        reply = prefill.submit(request).wait().reply

        def corrupt() -> None:
            for pool in prefill.end.manager.storage.pools:
                pool.add_(1)

        prefill.loop.call(corrupt).result(WAIT_SECONDS)
        sink = decode.submit(decode.fetch(request, reply)).wait()
        assert isinstance(sink.error, InvariantError)
        assert not sink.tokens[1:]
        assert decode.failed.wait(WAIT_SECONDS)
        with pytest.raises(Unavailable):
            decode.submit(decode.request(4))


def test_stop_fails_what_is_left_and_refuses_more() -> None:
    with nodes() as (prefill, _):
        prefill.engine.gate.clear()
        sinks = [prefill.submit(prefill.request(100)) for _ in range(3)]
        wait_until(lambda: prefill.engine.num_forward, WAIT_SECONDS, "the first is being computed")
        prefill.failed.set()  # no idle check at the end: the loop is gone
        prefill.engine.gate.set()
        assert prefill.loop.stop(WAIT_SECONDS)
        assert all(isinstance(sink.wait().error, Unavailable) for sink in sinks)
        with pytest.raises(Unavailable, match="shutting down"):
            prefill.submit(prefill.request(4))


def test_call_that_nobody_waits_for_any_more_does_not_stop_the_loop() -> None:
    with nodes() as (prefill, _):
        prefill.engine.gate.clear()
        computing = prefill.submit(prefill.request(10))
        wait_until(lambda: prefill.engine.num_forward, WAIT_SECONDS, "it computes")
        abandoned = prefill.loop.call(lambda: 1)
        assert abandoned.cancel()
        prefill.engine.gate.set()
        assert computing.wait().error is None
        assert prefill.loop.call(lambda: 2).result(WAIT_SECONDS) == 2


@pytest.mark.parametrize("kind", [RuntimeError, IndexError, AssertionError])
def test_what_the_model_cannot_compute_ends_that_request_only(kind: type[Exception]) -> None:
    with nodes() as (prefill, _):
        computing = prefill.engine.forward

        def fail(sequence: SequenceCache, token_ids: object) -> torch.Tensor:
            prefill.engine.forward = computing  # type: ignore[method-assign]
            raise kind("a bug of the library")

        prefill.engine.forward = fail  # type: ignore[method-assign]
        assert isinstance(prefill.submit(prefill.request(10)).wait().error, ComputeError)
        assert prefill.submit(prefill.request(10)).wait().error is None


def test_second_decode_with_the_same_key_is_refused_and_the_first_goes_on() -> None:
    with nodes() as (prefill, decode):
        prefill.end.bend = lambda message: held.append(message) if isinstance(message, TransferResult) else message
        held: list[TransferResult] = []
        request = prefill.request(30, hand_over=True)
        reply = prefill.submit(request).wait().reply
        first, second = (decode.submit(decode.fetch(request, reply)) for _ in range(2))
        assert isinstance(second.wait().error, ConfigError)
        wait_until(lambda: held, WAIT_SECONDS, "the sender's result")
        decode.end.transceiver.on_result(prefill.end.worker, held[0])
        assert first.wait().error is None


def test_broken_transport_ends_the_loop_and_every_request_and_says_so() -> None:
    with nodes() as (prefill, decode):
        request = prefill.request(30, hand_over=True)
        reply = prefill.submit(request).wait().reply
        prefill.end.bend = lambda message: None
        waiting = decode.submit(decode.fetch(request, reply))
        wait_until(lambda: decode.end.transceiver.num_receiving, WAIT_SECONDS, "the grant is out")

        def broken() -> list[object]:
            raise TransportError("loopback", "BROKEN", "broken by the test")

        decode.end.transceiver._transport.notifications = broken  # type: ignore[method-assign,assignment]
        assert "broken by the test" in str(waiting.wait().error)
        assert decode.failed.wait(WAIT_SECONDS)
        prefill.loop.cancel(reply.key, "the test is over")


def test_first_token_of_a_peer_outside_the_vocabulary_is_refused() -> None:
    def change(message: Message) -> Message:
        if isinstance(message, TransferResult) and message.aux is not None:
            return replace(message, aux=replace(message.aux, first_tokens=(384,)))
        return message

    with nodes() as (prefill, decode):
        prefill.end.bend = change
        request = prefill.request(10, hand_over=True)
        sink = decode.submit(decode.fetch(request, prefill.submit(request).wait().reply)).wait()
        assert isinstance(sink.error, TransferError)
        assert "first token 384" in str(sink.error)
        assert sink.events == []


def test_request_that_no_longer_fits_beside_quarantined_pages_is_refused_and_does_not_block_others() -> None:
    with nodes(quarantine_limit=1.0) as (prefill, _):
        manager = prefill.end.manager

        def lose() -> Hold:
            """25 blocks of both life cycles: 50 of the 64 slots."""
            sequence = manager.create_sequence("lost", (50,))
            sequence.resume()
            sequence.resize(capacity=100)
            hold = manager.hold(sequence.pages(100), Access.WRITE)
            sequence.close()
            return hold

        hold = prefill.loop.call(lose).result(WAIT_SECONDS)
        prefill.end.transceiver.quarantined_slots = lambda: (50,)  # type: ignore[method-assign]
        large, small = prefill.submit(prefill.request(60)), prefill.submit(prefill.request(8))
        error = large.wait().error
        assert isinstance(error, CapacityError)
        assert "[14] are left beside [50] in quarantine" in str(error)
        assert small.wait().error is None
        prefill.loop.call(lambda: manager.release(hold)).result(WAIT_SECONDS)
