"""Answers after reuse equal those of a cold run, for real models, on both sides, under every policy."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import get_args

import pytest

from kvferry.cache.admission import CommitPolicy, PoolOptions
from kvferry.transfer.engines.loaded_model import LoadedModel
from tests.deploy.loops import WAIT_SECONDS, Node, Sink, hand_over, nodes
from tests.deploy.models import TINY_LLAMA, cold_run, engine_of, logprob_tolerance, random_prompt, tiny_model
from tests.helpers import wait_until

P = 32
CHUNK_TOKENS = 96
NEW_TOKENS = 12
MODELS = ("tiny-gpt-oss", "tiny-gemma3", TINY_LLAMA)
POLICIES = get_args(CommitPolicy)
MANAGERS = ("V2", "V1")
WINDOWS: dict[str, int | None] = {"tiny-gpt-oss": 128, "tiny-gemma3": 512, TINY_LLAMA: None}
TIGHT_SLOTS = {
    ("tiny-gpt-oss", "V2"): 24,
    ("tiny-gpt-oss", "V1"): 14,
    **{("tiny-gemma3", manager): 27 for manager in MANAGERS},
    **{(TINY_LLAMA, manager): 14 for manager in MANAGERS},
}
COMBINATIONS = [
    *(("V2", policy) for policy in POLICIES),
    ("V1", "all_reusable"),
    pytest.param("V1", "off", marks=pytest.mark.full),
]


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest) -> LoadedModel:
    return tiny_model(request.param)


@dataclass(frozen=True)
class Service:
    """A prefill and a decode node over one model."""

    model: LoadedModel
    prefill: Node
    decode: Node
    chunk_tokens: int

    def ask(self, prompt: tuple[int, ...], *, salt: str = "") -> Sink:
        """One request, checked against a cold run."""
        sink = hand_over(self.prefill, self.decode, self.prefill.request(prompt, NEW_TOKENS, hand_over=True, salt=salt))
        check_like_cold(self.model, prompt, sink, self.chunk_tokens)
        return sink

    def ask_alone(self, prompt: tuple[int, ...]) -> Sink:
        """As `ask`, of the prefill node, which has both roles."""
        sink = self.prefill.submit(self.prefill.request(prompt, NEW_TOKENS)).wait()
        check_like_cold(self.model, prompt, sink, self.chunk_tokens)
        return sink


def check_like_cold(model: LoadedModel, prompt: tuple[int, ...], sink: Sink, chunk_tokens: int = CHUNK_TOKENS) -> None:
    assert sink.error is None
    expected = cold_run(model, prompt, NEW_TOKENS, chunk_tokens)
    assert sink.tokens == list(expected.token_ids)
    tolerance = logprob_tolerance(model, sink.summary.usage.cached_tokens)
    assert sink.logprobs == pytest.approx(expected.logprobs, abs=tolerance)


def reuse(sink: Sink) -> tuple[int, int]:
    """Tokens of the prompt that the prefill side, and the decode side, had already."""
    return sink.summary.usage.cached_tokens, sink.summary.decode_cached_tokens


@contextmanager
def service(
    model: LoadedModel,
    manager: str = "V2",
    policy: CommitPolicy = "all_reusable",
    *,
    num_slots: int = 200,
    chunk_tokens: int = CHUNK_TOKENS,
    window_scratch: bool = False,
) -> Iterator[Service]:
    options = PoolOptions(commit_policy=policy, window_scratch=window_scratch)
    with nodes(
        num_slots,
        engine=engine_of(model),
        manager=manager,
        tokens_per_block=P,
        options=options,
        prefill_chunk_tokens=chunk_tokens,
        max_seq_len_tokens=4096,
    ) as (prefill, decode):
        yield Service(model, prefill, decode, chunk_tokens)


def long_prompt(model: LoadedModel) -> tuple[int, ...]:
    """Longer than the window, and ends 25 tokens into a block."""
    return random_prompt((WINDOWS[model.name] or 128) + 217)


@dataclass(frozen=True)
class Expected:
    """What a manager under a policy can reuse of earlier prompts.

    Attributes:
        windowed: some layers have a window, which the earlier prompts exceeded.
    """

    policy: CommitPolicy
    manager: str
    windowed: bool

    def on_prefill(self, common_tokens: int, *, at_the_end: bool) -> int:
        """Of so many tokens in common; `at_the_end`: with all but the last token of the earlier one."""
        lost = self.windowed and self.policy != "all_reusable" and (self.manager == "V1" or not at_the_end)
        if self.policy == "off" or lost:
            return 0
        return common_tokens if self.manager == "V2" else common_tokens // P * P

    def on_decode(self, common_tokens: int, *, at_the_end: bool) -> int:
        """Of so many tokens in common with an earlier prompt and its answer.

        Pages that had left the window never came. Those that left it since are kept by one policy only.
        """
        lost = self.windowed and (self.manager == "V1" or not at_the_end)
        return 0 if self.policy == "off" or lost else common_tokens // P * P


@pytest.mark.parametrize("manager, policy", COMBINATIONS)
def test_reuse_on_both_sides_is_exact(model: LoadedModel, manager: str, policy: CommitPolicy) -> None:
    expected = Expected(policy, manager, WINDOWS[model.name] is not None)
    prompt = long_prompt(model)
    common = len(prompt) - 60  # ends inside a block
    with service(model, manager, policy) as asked:
        num_groups = len(asked.decode.manager.layout.life_cycles)
        cold = asked.ask(prompt)
        assert reuse(cold) == (0, 0)
        again = asked.ask(prompt)
        same, kept = len(prompt) - 1, policy == "all_reusable"
        assert reuse(again) == (expected.on_prefill(same, at_the_end=True), expected.on_decode(same, at_the_end=kept))
        # One block was not there: its page of every life cycle moves.
        assert again.summary.wire.num_pages == (num_groups if reuse(again)[1] else cold.summary.wire.num_pages)
        branch = asked.ask(prompt[:common] + random_prompt(70, seed=1))
        assert reuse(branch) == (
            expected.on_prefill(common, at_the_end=False),
            expected.on_decode(common, at_the_end=False),
        )
        turn = asked.ask((*prompt, *cold.tokens, *random_prompt(40, seed=2)))
        assert reuse(turn) == (
            expected.on_prefill(len(prompt), at_the_end=True),
            expected.on_decode(len(prompt) + NEW_TOKENS - 1, at_the_end=True),
        )


def test_reuse_that_leaves_the_chunks_alone_gives_the_very_bits(model: LoadedModel) -> None:
    prompt = long_prompt(model)
    common = len(prompt) // P * P - P
    branch = (*prompt[:common], other_token(prompt[common]), *random_prompt(40, seed=1))
    expected = cold_run(model, branch, NEW_TOKENS, P)
    with service(model, chunk_tokens=P) as asked:
        asked.ask(prompt)
        sink = asked.ask(branch)
    assert sink.summary.usage.cached_tokens == common
    assert (tuple(sink.tokens), tuple(sink.logprobs)) == expected


def other_token(token: int) -> int:
    return 4 if token == 3 else 3


def test_answer_alone_after_reuse_equals_a_cold_run(model: LoadedModel) -> None:
    prompt = long_prompt(model)
    with service(model) as asked:
        first = asked.ask_alone(prompt)
        turn = asked.ask_alone((*prompt, *first.tokens, *random_prompt(40, seed=2)))
        moved = asked.ask((*prompt, *first.tokens, *random_prompt(50, seed=3)))
    # The last token generated was never computed.
    assert turn.summary.usage.cached_tokens == len(prompt) + NEW_TOKENS - 1
    assert moved.summary.usage.cached_tokens >= len(prompt) + NEW_TOKENS - 1
    assert moved.summary.decode_cached_tokens == 0


def test_other_salt_shares_nothing(model: LoadedModel) -> None:
    prompt = long_prompt(model)
    with service(model) as asked:
        assert reuse(asked.ask(prompt)) == (0, 0)
        assert reuse(asked.ask(prompt, salt="tenant")) == (0, 0)
        assert min(reuse(asked.ask(prompt, salt="tenant"))) > 0
        assert reuse(asked.ask(prompt, salt="another")) == (0, 0)


@pytest.mark.parametrize("manager", MANAGERS)
def test_answers_under_constant_eviction_equal_a_cold_run(model: LoadedModel, manager: str) -> None:
    """Pools that hold little more than one request: parts of the shared prefix go and are computed again."""
    common = long_prompt(model)
    prompts = [common[: len(common) - 35 * cut] + random_prompt(20 + cut, seed=4) for cut in (0, 3, 1, 4, 0, 2, 3)]
    with service(model, manager, num_slots=TIGHT_SLOTS[model.name, manager]) as asked:
        found = [reuse(asked.ask(prompt)) for prompt in prompts]
        evicted = [node.manager.published.num_dropped for node in (asked.prefill, asked.decode)]
    assert sum(prefill for prefill, _ in found[1:]) > 0
    assert all(number > 0 for number in evicted)


@pytest.mark.parametrize("name, chunk_tokens", [("tiny-gpt-oss", 300), ("tiny-gemma3", 700)])
@pytest.mark.parametrize("manager", MANAGERS)
def test_answer_over_scratch_pages_equals_a_cold_run(name: str, chunk_tokens: int, manager: str) -> None:
    """A chunk longer than the window: what leaves the window within it has no pages of its own."""
    model = tiny_model(name)
    window = WINDOWS[name]
    assert window is not None
    prompt = random_prompt(2 * chunk_tokens + 50)
    with service(model, manager, chunk_tokens=chunk_tokens, window_scratch=True) as asked:
        asked.prefill.engine.gate.clear()
        sink = asked.prefill.submit(asked.prefill.request(prompt, NEW_TOKENS))
        wait_until(lambda: asked.prefill.engine.num_forward, WAIT_SECONDS, "the first chunk has its pages")
        scratch = sum(len(slots) for slots in asked.prefill.manager.scratch.slots.values())
        asked.prefill.engine.gate.set()
        check_like_cold(model, prompt, sink.wait(), chunk_tokens)
        assert 0 < scratch < (chunk_tokens - window) // P
        again = asked.ask(prompt)
        branch = asked.ask(prompt[: chunk_tokens // 2] + random_prompt(40, seed=1))
    assert again.summary.usage.cached_tokens == (len(prompt) - 1 if manager == "V2" else 0)
    # Blocks that were on scratch pages cannot be reused.
    assert branch.summary.usage.cached_tokens == 0


RECURRENT_MODELS = ("tiny-qwen3-next", "tiny-nemotron-h", "tiny-falcon-h1")


@pytest.mark.parametrize("name", RECURRENT_MODELS)
def test_answer_from_a_recurrent_snapshot_equals_a_cold_run(name: str) -> None:
    """A state can be taken up only where a copy of it was published: at the end of chunks and of requests."""
    model = tiny_model(name)
    prompt = random_prompt(345)
    with service(model) as asked:
        first = asked.ask(prompt)
        again = asked.ask(prompt)
        branch = asked.ask(prompt[:230] + random_prompt(60, seed=1))
        turn = asked.ask((*prompt, *first.tokens, *random_prompt(40, seed=2)))
    assert [sink.summary.usage.cached_tokens for sink in (again, branch, turn)] == [288, 192, 345]
    # Its state comes from the prefill side, so the decode side needs none to take up its blocks.
    assert [sink.summary.decode_cached_tokens for sink in (again, branch, turn)] == [320, 224, 352]


@pytest.mark.parametrize("name", RECURRENT_MODELS)
def test_static_pools_reuse_nothing_beside_a_recurrent_state(name: str) -> None:
    prompt = random_prompt(200)
    with service(tiny_model(name), "V1") as asked:
        sinks = [asked.ask(prompt) for _ in range(2)]
    assert [sink.summary.usage.cached_tokens for sink in sinks] == [0, 0]
