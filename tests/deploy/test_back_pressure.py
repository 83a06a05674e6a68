"""Bytes of pages under way bound what a loop takes in and what it holds for others."""

import numpy as np
import pytest

from kvferry.deploy.loop_settings import LoopSettings
from kvferry.deploy.transfers import page_bytes, prompt_bytes
from kvferry.transfer.types import Message, TransferResult
from tests.deploy.loops import WAIT_SECONDS, Node, Sink, hand_over, nodes, synthetic_engine
from tests.helpers import wait_until
from tests.transfer.pairs import v1_manager, v2_manager

TOKENS = 30
LAYOUT = v2_manager(synthetic_engine().spec, 8).layout
PROMPT_BYTES = prompt_bytes(LAYOUT, TOKENS)


def prompts(count: int, tokens: int = TOKENS) -> list[tuple[int, ...]]:
    """Prompts without a common block."""
    return [tuple(10 * index + position % 9 for position in range(tokens)) for index in range(count)]


def hold_back_results(prefill: Node) -> list[TransferResult]:
    """The receiver waits for the last word on every transfer. Returns where the words go."""
    held: list[TransferResult] = []

    def bend(message: Message) -> Message | None:
        if isinstance(message, TransferResult):
            held.append(message)
            return None
        return message

    prefill.end.bend = bend
    return held


def fetch_all(prefill: Node, decode: Node, prompts_: list[tuple[int, ...]]) -> list[Sink]:
    requests = [prefill.request(prompt, hand_over=True) for prompt in prompts_]
    replies = [prefill.submit(request).wait().reply for request in requests]
    return [decode.submit(decode.fetch(request, reply)) for request, reply in zip(requests, replies, strict=True)]


@pytest.mark.parametrize("make_manager", [v1_manager, v2_manager])
@pytest.mark.parametrize("tokens", [1, 4, 7, 8, 9, TOKENS])
def test_bytes_of_a_prompt_are_those_of_the_pages_it_gets(make_manager: object, tokens: int) -> None:
    manager = make_manager(synthetic_engine().spec, 64)  # type: ignore[operator]
    sequence = manager.create_sequence("r")
    sequence.resume()
    sequence.resize(capacity=tokens, history=tokens)
    pages = sequence.pages(tokens)
    assert page_bytes(manager.layout, pages) == prompt_bytes(manager.layout, tokens) > 0
    assert page_bytes(manager.layout, pages._replace(slots=tuple(np.full_like(s, -1) for s in pages.slots))) == 0
    sequence.close()


@pytest.mark.parametrize("max_bytes, together", [(0, 3), (3 * PROMPT_BYTES, 3), (2 * PROMPT_BYTES, 2), (1, 1)])
def test_no_more_bytes_are_granted_at_one_time_than_the_budget(max_bytes: int, together: int) -> None:
    with nodes(num_slots=200, max_receiving_bytes=max_bytes) as (prefill, decode):
        held = hold_back_results(prefill)
        sinks = fetch_all(prefill, decode, prompts(3))
        wait_until(lambda: len(held) == together, WAIT_SECONDS, "the first are sent")
        assert decode.loop.call(lambda: (len(held), decode.loop.num_waiting)).result(WAIT_SECONDS) == (
            together,
            3 - together,
        )
        for number in range(3):
            wait_until(lambda number=number: len(held) > number, WAIT_SECONDS, "one more is sent")
            decode.end.transceiver.on_result(prefill.end.worker, held[number])
            assert sinks[number].wait().error is None


def test_small_request_behind_a_large_one_does_not_pass_it() -> None:
    with nodes(num_slots=200, max_receiving_bytes=2 * PROMPT_BYTES) as (prefill, decode):
        held = hold_back_results(prefill)
        first, large, small = prompts(3)
        sinks = fetch_all(prefill, decode, [first, large + large, small[:4]])
        wait_until(lambda: held, WAIT_SECONDS, "the first is sent")
        assert decode.loop.call(lambda: (len(held), decode.loop.num_waiting)).result(WAIT_SECONDS) == (1, 2)
        prefill.end.bend = lambda message: message
        decode.end.transceiver.on_result(prefill.end.worker, held[0])
        assert all(sink.wait().error is None for sink in sinks)


def test_prefill_pauses_while_too_many_bytes_are_held() -> None:
    with nodes(num_slots=200, max_held_bytes=PROMPT_BYTES) as (prefill, decode):
        requests = [prefill.request(prompt, hand_over=True) for prompt in prompts(2)]
        sinks = [prefill.submit(request) for request in requests]
        wait_until(lambda: sinks[0].num_finished, WAIT_SECONDS, "the first is offered")
        computed = prefill.loop.call(lambda: set(prefill.engine.computed)).result(WAIT_SECONDS)
        assert computed == {requests[0].request_id}
        for request, sink in zip(requests, sinks, strict=True):
            assert decode.submit(decode.fetch(request, sink.wait().reply)).wait().error is None


def test_prompt_larger_than_the_budgets_is_served_alone() -> None:
    with nodes(num_slots=200, max_held_bytes=1, max_receiving_bytes=1) as (prefill, decode):
        for prompt in prompts(2):
            assert hand_over(prefill, decode, prefill.request(prompt, hand_over=True)).error is None


def test_request_that_computes_here_to_the_end_needs_no_room_for_transfers() -> None:
    with nodes(num_slots=200, max_held_bytes=1) as (prefill, _):
        held, alone = prompts(2)
        reply = prefill.submit(prefill.request(held, hand_over=True)).wait().reply
        assert prefill.submit(prefill.request(alone)).wait().error is None
        prefill.loop.cancel(reply.key, "the test is over")


def test_budgets_are_without_limit_unless_set() -> None:
    settings = LoopSettings(16, 400, 8, 4, 4, 30.0, 30.0)
    assert (settings.max_receiving_bytes, settings.max_held_bytes) == (0, 0)
