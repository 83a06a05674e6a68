"""Engine loops that share pages and run out of them: caps, gates, stalls, eviction, and requests that end halfway."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch

from kvferry.cache.admission import PoolOptions
from kvferry.cache.errors import CapacityError, ComputeError, TransferCancelled, TransferError
from kvferry.cache.sequence import SequenceCache
from kvferry.transfer.types import Grant
from tests.deploy.loops import WAIT_SECONDS, Node, Sink, counting_prompt, hand_over, nodes
from tests.helpers import wait_until

P = 4
CHUNK_TOKENS = 16
STALL_SECONDS = 0.2
POLICIES = ("all_reusable", "per_request", "per_conversation")


def cold_tokens(prompts: Sequence[tuple[int, ...]], new_tokens: int) -> list[list[int]]:
    """Answers from pools that keep nothing for later."""
    with nodes(256, options=PoolOptions(commit_policy="off")) as (alone, _):
        return [alone.submit(alone.request(prompt, new_tokens)).wait().tokens for prompt in prompts]


def run_in_loop(node: Node, function: Callable[[], object]) -> object:
    return node.loop.call(function).result(WAIT_SECONDS)


@contextmanager
def foreign_pages(node: Node, num_tokens: int) -> Iterator[None]:
    """Pages of a sequence that no request of the loop knows, and that nothing will give back."""

    def take() -> SequenceCache:
        sequence = node.manager.create_sequence("foreign")
        sequence.resume()
        sequence.resize(capacity=num_tokens)
        return sequence

    taken = node.loop.call(take).result(WAIT_SECONDS)
    yield
    run_in_loop(node, taken.close)


@contextmanager
def paused(node: Node) -> Iterator[None]:
    """The node's loop stands in the middle of a step, which goes on afterwards."""
    node.engine.gate.clear()
    wait_until(lambda: node.engine.at_gate, WAIT_SECONDS, "a step begins")
    yield
    node.engine.gate.set()


# ---- caps and gates


@pytest.mark.parametrize("max_sequences, in_turn", [(1, True), (2, False), (None, False)])
def test_no_more_than_max_sequences_are_computed_together(max_sequences: int | None, in_turn: bool) -> None:
    with nodes(200, options=PoolOptions(max_sequences=max_sequences)) as (alone, _):
        requests = [alone.request(40, 40) for _ in range(3)]
        sinks = [alone.submit(request) for request in requests]
        assert all(sink.wait().error is None for sink in sinks)
        order = [request.request_id for request in requests]
        assert (sorted(alone.engine.computed, key=order.index) == alone.engine.computed) is in_turn


@pytest.mark.parametrize("limit, together", [(1.0, True), (0.3, False)])
def test_request_starts_only_while_others_hold_no_more_than_max_util_for_resume(limit: float, together: bool) -> None:
    with nodes(64, options=PoolOptions(max_util_for_resume=limit)) as (alone, _):
        # 80 tokens: 20 blocks of full attention alone are 0.31 of 64 slots.
        requests = [alone.request(80, 60), alone.request((7, 7, 7), 2)]
        first = alone.submit(requests[0])
        wait_until(lambda: len(first.tokens) > 1, WAIT_SECONDS, "the first decodes")
        with paused(alone):
            second = alone.submit(requests[1])
        assert first.wait().error is None
        assert second.wait().error is None
        last_step = len(alone.engine.computed) - 1 - alone.engine.computed[::-1].index(requests[0].request_id)
        assert (alone.engine.computed.index(requests[1].request_id) < last_step) is together


# ---- stalls


@pytest.mark.parametrize(
    "options, story",
    [
        (PoolOptions(), "needs [12] slots per pool group, [4] are not spoken for"),
        (PoolOptions(max_util_for_resume=0.5), "max_util_for_resume forbids it"),
        (PoolOptions(max_sequences=1), "1 sequences are open, max_sequences is 1"),
    ],
)
def test_request_that_waits_while_nothing_moves_ends_long_before_its_deadline(options: PoolOptions, story: str) -> None:
    # 60 tokens of another sequence are 15 pages of the window and 15 of full attention.
    num_slots = 34 if options == PoolOptions() else 50
    with nodes(num_slots, options=options, stall_seconds=STALL_SECONDS) as (alone, _):
        with foreign_pages(alone, 60):
            started = time.monotonic()
            waiting = [alone.submit(alone.request(20, 4)) for _ in range(2)]
            errors = [sink.wait().error for sink in waiting]
            assert STALL_SECONDS <= time.monotonic() - started < WAIT_SECONDS
        for error in errors:
            assert isinstance(error, CapacityError)
            assert not error.permanent
            assert "nothing moves" in str(error)
        assert story in str(errors[0])
        assert alone.submit(alone.request(20, 4)).wait().error is None


def test_decode_request_that_waits_while_nothing_moves_ends_too() -> None:
    with nodes(34, stall_seconds=STALL_SECONDS) as (prefill, decode):
        request = prefill.request(20, 4, hand_over=True)
        reply = prefill.submit(request).wait().reply
        with foreign_pages(decode, 60):
            error = decode.submit(decode.fetch(request, reply)).wait().error
            assert isinstance(error, CapacityError)
            assert "nothing moves" in str(error)
            wait_until(prefill.is_idle, WAIT_SECONDS, "nobody will fetch the prompt: its pages are free at once")
        assert hand_over(prefill, decode, prefill.request(20, 4, hand_over=True)).error is None


def test_request_that_waits_for_another_that_computes_does_not_count_as_stalled() -> None:
    with nodes(34, stall_seconds=STALL_SECONDS) as (alone, _):
        first = alone.submit(alone.request(40, 60))
        wait_until(lambda: len(first.tokens) > 1, WAIT_SECONDS, "the first decodes")
        second = alone.submit(alone.request(41, 4))
        # Several steps that take longer than the patience, most of them without a change in the books.
        for _ in range(3):
            with paused(alone):
                started = time.monotonic()
                wait_until(lambda: time.monotonic() > started + 1.2 * STALL_SECONDS, WAIT_SECONDS, "slow")  # noqa: B023
        assert not second.num_finished
        assert first.wait().error is None
        assert second.wait().error is None


# ---- reuse


@pytest.mark.parametrize("policy", POLICIES)
def test_pages_are_reused_while_another_request_still_uses_them(policy: str) -> None:
    prompt = counting_prompt(50)
    (expected,) = cold_tokens([prompt], 100)
    with nodes(200, options=PoolOptions(commit_policy=policy)) as (alone, _):
        first = alone.submit(alone.request(prompt, 100))
        # By then the block with the prompt's last tokens is full.
        wait_until(lambda: len(first.tokens) > P, WAIT_SECONDS, "the first decodes")
        with paused(alone):
            second = alone.submit(alone.request(prompt, 100))
        assert first.wait().tokens == expected
        assert second.wait().tokens == expected
        # The other policies publish when a request ends.
        assert second.summary.usage.cached_tokens == (49 if policy == "all_reusable" else 0)
        third = alone.submit(alone.request((*prompt, *expected[:-1], 3), 4)).wait()
        assert third.summary.usage.cached_tokens == 50 + 99


def test_grant_names_no_pages_of_blocks_that_are_there_already() -> None:
    with nodes() as (prefill, decode):
        for _ in range(2):
            request = prefill.request(50, 8, hand_over=True)
            sink = hand_over(prefill, decode, request)
            assert sink.error is None
        cold, again = (message for message in decode.end.sent if isinstance(message, Grant))
        groups = [str(group.life_cycle) for group in decode.manager.layout.life_cycles]
        absent = {name: (slots < 0).sum() for name, slots in zip(groups, cold.pages.slots, strict=True)}
        # The query at 50 sees tokens 43 to 50: blocks 0 to 9 are stale.
        assert absent == {"window 8": 10, "full": 0}
        assert all((slots[:12] == -1).all() and slots[12] >= 0 for slots in again.pages.slots)
        assert (sink.summary.decode_cached_tokens, sink.summary.wire.num_pages) == (48, 2)


@pytest.mark.parametrize("policy", POLICIES)
def test_cancel_in_the_middle_of_a_prompt_with_reuse_leaves_the_books_clean(policy: str) -> None:
    prompt = (*counting_prompt(50), *range(3, 90))
    (expected,) = cold_tokens([prompt], 6)
    with nodes(options=PoolOptions(commit_policy=policy)) as (alone, _):
        assert alone.submit(alone.request(50, 1)).wait().error is None
        computed = alone.engine.num_forward
        alone.engine.gate.clear()
        cancelled = alone.request(prompt, 6)
        sink = alone.submit(cancelled)
        wait_until(lambda: alone.engine.num_forward > computed, WAIT_SECONDS, "it is being computed")
        cancelled.cancelled.set()
        alone.engine.gate.set()
        assert isinstance(sink.wait().error, TransferCancelled)
        assert alone.engine.num_forward == computed + 1
        wait_until(alone.is_idle, WAIT_SECONDS, "nobody uses any page")
        again = alone.submit(alone.request(prompt, 6)).wait()
        assert again.tokens == expected
        # The prompt before it, and the chunk that was computed where that is published at once.
        one_chunk = 50 + CHUNK_TOKENS if policy == "all_reusable" else 50
        assert again.summary.usage.cached_tokens == one_chunk


def fail_once(node: Node, computed: int) -> None:
    """The pass after `computed` more passes writes its pages, then rubbish all over them, and fails."""
    forward, left = node.engine.forward, iter(range(computed, -1, -1))

    def fail(sequence: SequenceCache, token_ids: object) -> torch.Tensor:
        logits = forward(sequence, token_ids)  # type: ignore[arg-type]
        if next(left):
            return logits
        node.engine.forward = forward  # type: ignore[method-assign]
        for layer, group in enumerate([0, 1, 0, 1]):
            slots = sequence.slots(node.manager.layout.life_cycles[group].id)[sequence.history // P :]
            for role in ("key", "value"):
                node.manager.buffer(layer, role)[torch.from_numpy(slots[slots >= 0].astype("int64"))] = 7.0
        raise RuntimeError("a bug of the library")

    node.engine.forward = fail  # type: ignore[method-assign]


@pytest.mark.parametrize("policy", POLICIES)
def test_prompt_that_fails_halfway_publishes_nothing_of_the_failed_chunk(policy: str) -> None:
    prompt = counting_prompt(60)
    (expected,) = cold_tokens([prompt], 6)
    with nodes(options=PoolOptions(commit_policy=policy)) as (alone, _):
        fail_once(alone, 2)
        assert isinstance(alone.submit(alone.request(prompt, 6)).wait().error, ComputeError)
        published = 2 * CHUNK_TOKENS if policy == "all_reusable" else 0
        assert run_in_loop(alone, lambda: alone.manager.probe(prompt)) == published
        again = alone.submit(alone.request(prompt, 6)).wait()
        assert again.tokens == expected
        assert again.summary.usage.cached_tokens == published


@pytest.mark.parametrize("policy", POLICIES)
def test_decode_step_that_fails_publishes_nothing_of_its_token(policy: str) -> None:
    prompt = counting_prompt(30)
    (expected,) = cold_tokens([prompt], 8)
    with nodes(options=PoolOptions(commit_policy=policy)) as (alone, _):
        fail_once(alone, 2 + 3)
        failed = alone.submit(alone.request(prompt, 8)).wait()
        assert isinstance(failed.error, ComputeError)
        assert failed.tokens == expected[:4]
        published = 30 + 3 if policy == "all_reusable" else 0
        assert run_in_loop(alone, lambda: alone.manager.probe((*prompt, *expected))) == published
        assert alone.submit(alone.request(prompt, 8)).wait().tokens == expected


def test_prompt_whose_transfer_fails_publishes_nothing_on_the_decode_side() -> None:
    with nodes() as (prefill, decode):
        first = prefill.request(30, 6, hand_over=True)
        assert hand_over(prefill, decode, first).error is None
        prompt = (*counting_prompt(29), 200, 201, 202, *range(50, 70))
        request = prefill.request(prompt, 6, hand_over=True)
        reply = prefill.submit(request).wait().reply
        prefill.loop.cancel(reply.key, "not wanted")
        wait_until(lambda: not prefill.end.transceiver.num_sending, WAIT_SECONDS, "the offer is gone")
        assert isinstance(decode.submit(decode.fetch(request, reply)).wait().error, TransferError)
        wait_until(decode.is_idle, WAIT_SECONDS, "nobody uses any page")
        assert run_in_loop(decode, lambda: decode.manager.probe(prompt)) == 29
        again = hand_over(prefill, decode, prefill.request(prompt, 6, hand_over=True))
        assert again.tokens == cold_tokens([prompt], 6)[0]
        assert again.summary.decode_cached_tokens == 28


# ---- eviction


def branching_prompts(number: int) -> list[tuple[int, ...]]:
    """Prompts that begin alike and go apart at different places, some inside a block."""
    common = counting_prompt(60)
    return [
        (*common[: 60 - 7 * (index % 8)], *(3 + (index * 31 + i) % 250 for i in range(5 + index % 9)))
        for index in range(number)
    ]


@pytest.mark.parametrize(
    "policy, manager, num_slots", [*((policy, "V2", 50) for policy in POLICIES), ("all_reusable", "V1", 30)]
)
def test_many_requests_over_tiny_pools_give_the_tokens_of_a_cold_run(policy: str, manager: str, num_slots: int) -> None:
    prompts = branching_prompts(24)
    expected = cold_tokens(prompts, 10)
    options = PoolOptions(commit_policy=policy)
    with nodes(num_slots, manager=manager, options=options, max_waiting=30) as (prefill, decode):
        requests = [prefill.request(prompt, 10, hand_over=True) for prompt in prompts]
        sinks = [prefill.submit(request) for request in requests]
        answers = [decode.submit(decode.fetch(r, s.wait().reply)) for r, s in zip(requests, sinks, strict=True)]
        assert [answer.wait().tokens for answer in answers] == expected
        evicted = [node.manager.published.num_dropped for node in (prefill, decode)]
        reused = sum(answer.summary.usage.cached_tokens for answer in answers)
    assert all(number > 0 for number in evicted)
    # The other policies keep of a window only what the end of an earlier request can be taken up with.
    assert (reused > 0) is (policy == "all_reusable")


@pytest.mark.parametrize("policy", POLICIES)
def test_many_requests_on_one_node_over_tiny_pools_give_the_tokens_of_a_cold_run(policy: str) -> None:
    prompts = branching_prompts(16)
    expected = cold_tokens(prompts, 20)
    with nodes(60, options=PoolOptions(commit_policy=policy), max_waiting=30) as (alone, _):
        sinks = [alone.submit(alone.request(prompt, 20)) for prompt in prompts]
        assert [sink.wait().tokens for sink in sinks] == expected
        assert alone.manager.published.num_dropped > 0
    assert (sum(sink.summary.usage.cached_tokens for sink in sinks) > 0) is (policy == "all_reusable")


def test_conversation_of_many_turns_is_taken_up_on_both_sides() -> None:
    with nodes(200, options=PoolOptions(commit_policy="per_conversation")) as (prefill, decode):
        prompt = counting_prompt(30)
        for turn in range(6):
            sink = hand_over(prefill, decode, prefill.request(prompt, 9, hand_over=True))
            check_turn(sink, prompt, first=turn == 0)
            before, prompt = prompt, (*prompt, *sink.tokens, *range(10 + turn, 21 + turn))
            assert len(prompt) == len(before) + 20
    assert cold_tokens([before], 9) == [sink.tokens]


def check_turn(sink: Sink, prompt: tuple[int, ...], *, first: bool) -> None:
    """A turn adds 20 tokens: the prefill side had all but these, the decode side the 8 it decoded with as well."""
    assert sink.error is None
    reused = (sink.summary.usage.cached_tokens, sink.summary.decode_cached_tokens)
    known = len(prompt) - 20
    assert reused == ((0, 0) if first else (known, (known + 8) // P * P))
