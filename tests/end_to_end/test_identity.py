"""Disaggregated output equals one process, over NIXL, for models with the real windows."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import get_args

import pytest

from kvferry.cache.admission import CommitPolicy
from kvferry.cache.layout import build_layout, build_static_layout
from kvferry.cache.lifecycle import LifeCycle, ceil_div
from kvferry.transfer.engines.loaded_model import LoadedModel
from kvferry.transfer.engines.models import load_model
from kvferry.transfer.engines.oracle import generate_in_one_process
from kvferry.transfer.inference import GenerateCall
from tests.deploy.models import logprob_tolerance
from tests.end_to_end.serving import CHUNK_TOKENS, Answer, Service, call_for, prompt_of, serving
from tests.helpers import wait_until

LENGTHS = (1, 31, 32, 33, 127, 128, 129, 159, 160, 511, 512, 513, 543, 544, 1500)
TOKENS_PER_BLOCK = 32
WINDOWS = {"tiny-gpt-oss": 128, "tiny-gemma3": 512}


@dataclass(frozen=True)
class Served:
    """A running cluster, the model it serves and the manager of its pools."""

    model: LoadedModel
    manager: str
    service: Service

    def ask(self, call: GenerateCall) -> Answer:
        return self.service.ask(call)


def _case(model: str, manager: str, *marks: pytest.MarkDecorator) -> object:
    """All tests of one cluster run in one process."""
    name = f"{model}-{manager}"
    return pytest.param((model, manager), id=name, marks=[pytest.mark.xdist_group(name), *marks])


CASES = [
    _case("tiny-gpt-oss", "V2"),
    _case("tiny-gemma3", "V2"),
    _case("tiny-gpt-oss", "V1"),
    # Its pools are those of V2: the life cycles differ in the size of their slots anyway.
    _case("tiny-gemma3", "V1", pytest.mark.full),
]


@pytest.fixture(scope="module", params=CASES)
def served(request: pytest.FixtureRequest) -> Iterator[Served]:
    model, manager = request.param
    with serving(model=model, pools={"manager": manager}) as service:
        yield Served(load_model(model), manager, service)


def check_identical(model: LoadedModel, call: GenerateCall, answer: Answer) -> None:
    assert call.prompt_token_ids is not None
    expected = generate_in_one_process(model, call.prompt_token_ids, call.sampling, CHUNK_TOKENS)
    assert answer.tokens == tuple(expected.token_ids)
    tolerance = logprob_tolerance(model, answer.summary.usage.cached_tokens)
    assert answer.logprobs == pytest.approx(expected.logprobs, abs=tolerance)
    assert answer.summary.new_tokens == call.sampling.max_new_tokens == len(answer.tokens)


@pytest.mark.parametrize("num_tokens", LENGTHS)
def test_greedy_answer_is_identical_to_one_process(served: Served, num_tokens: int) -> None:
    call = call_for(prompt_of(num_tokens))
    answer = served.ask(call)
    check_identical(served.model, call, answer)
    assert answer.summary.sender.name == "prefill-0"
    assert answer.summary.receiver.name == "decode-0"
    wait_until(served.service.is_idle, 10.0, "nobody uses any page")


def test_seeded_answer_is_identical_to_one_process(served: Served) -> None:
    calls = [call_for(prompt_of(200), temperature=1.0, seed=seed) for seed in (1, 2)]
    answers = served.service.ask_all(calls)
    for call, answer in zip(calls, answers, strict=True):
        check_identical(served.model, call, answer)
    assert answers[0].tokens != answers[1].tokens


def test_sixteen_concurrent_requests_are_identical_to_one_process(served: Served) -> None:
    lengths = (*LENGTHS, 700)
    calls = [call_for(prompt_of(num_tokens, seed=1)) for num_tokens in lengths]
    answers = served.service.ask_all(calls)
    for call, answer in zip(calls, answers, strict=True):
        check_identical(served.model, call, answer)
    wait_until(served.service.is_idle, 10.0, "nobody uses any page")


def test_single_token_answer_needs_no_decode_step(served: Served) -> None:
    call = call_for(prompt_of(40), max_new_tokens=1)
    answer = served.ask(call)
    check_identical(served.model, call, answer)
    assert answer.summary.timings.first_decode_step_seconds == 0.0


def test_transfer_is_nixl_and_moves_one_run_per_page(served: Served) -> None:
    build = build_layout if served.manager == "V2" else build_static_layout
    layout = build(served.model.spec, tokens_per_block=TOKENS_PER_BLOCK)
    answer = served.ask(call_for(prompt_of(1500), salt="nothing to share"))
    wire = answer.summary.wire
    pages = [expected_pages(group.life_cycle, 1500) for group in layout.life_cycles]
    assert {status.transport for status in served.service.statuses().values()} == {"NIXL"}
    assert wire.lane == "cma"
    assert wire.num_pages == sum(pages)
    assert wire.num_bytes == sum(n * group.slot_bytes for n, group in zip(pages, layout.life_cycles, strict=True))
    # One run per page; runs of slots that step together on both sides merge. How many merge depends on how the chunks
    # of the two sides interleaved their life cycles in a shared pool.
    assert len(layout.life_cycles) <= wire.num_descriptors <= wire.num_pages // 4
    assert wire.num_slices == 1


def test_conversation_over_nixl_moves_only_what_is_new_and_stays_identical(served: Served) -> None:
    window = WINDOWS[served.model.name]
    prompt = prompt_of(window + 217, seed=3)
    call = call_for(prompt)
    cold = served.ask(call)
    turn_call = call_for((*prompt, *cold.tokens, *prompt_of(50, seed=4)))
    turn = served.ask(turn_call)
    branch_call = call_for((*prompt[:-60], *prompt_of(70, seed=5)))
    branch = served.ask(branch_call)
    for asked, answer in ((call, cold), (turn_call, turn), (branch_call, branch)):
        check_identical(served.model, asked, answer)
    whole_blocks = len(prompt) // TOKENS_PER_BLOCK * TOKENS_PER_BLOCK
    if served.manager == "V2":
        assert turn.summary.usage.cached_tokens == len(prompt)
        assert branch.summary.usage.cached_tokens == len(prompt) - 60
        # The answer's first 31 tokens were computed on the decode side: prompt and answer are 248 and so many windows.
        assert turn.summary.decode_cached_tokens == (len(prompt) + 31) // TOKENS_PER_BLOCK * TOKENS_PER_BLOCK
        assert turn.summary.wire.num_pages < cold.summary.wire.num_pages / 2
    else:
        assert turn.summary.usage.cached_tokens == whole_blocks
        # Pages that were out of the window when the prompt came are not there, and V1 wants every page.
        assert turn.summary.decode_cached_tokens == 0
    wait_until(served.service.is_idle, 10.0, "nobody uses any page")


def test_other_salt_shares_nothing_over_nixl(served: Served) -> None:
    calls = [call_for(prompt_of(300, seed=6), 4, salt=salt) for salt in ("", "tenant", "tenant", "another")]
    answers = [served.ask(call) for call in calls]
    for call, answer in zip(calls, answers, strict=True):
        check_identical(served.model, call, answer)
    cached = [answer.summary.usage.cached_tokens for answer in answers]
    assert [tokens > 0 for tokens in cached] == [False, False, True, False]
    assert [answer.summary.decode_cached_tokens for answer in answers if answer is not answers[2]] == [0, 0, 0]


@pytest.mark.full
@pytest.mark.xdist_group("policies")
@pytest.mark.parametrize(
    "policy, manager", [*((policy, "V2") for policy in get_args(CommitPolicy)), ("off", "V1"), ("all_reusable", "V1")]
)
def test_conversation_under_every_policy_is_identical_to_one_process(policy: str, manager: str) -> None:
    model = load_model("tiny-gpt-oss")
    prompt = prompt_of(345)
    with serving(model=model.name, pools={"manager": manager, "commit_policy": policy}) as service:
        cached = []
        for turn in range(3):
            call = call_for(prompt)
            answer = service.ask(call)
            check_identical(model, call, answer)
            cached.append(answer.summary.usage.cached_tokens)
            known, prompt = len(prompt), (*prompt, *answer.tokens, *prompt_of(30, seed=turn))
        wait_until(service.is_idle, 10.0, "nobody uses any page")
    reuses = policy != "off"
    assert [tokens > 0 for tokens in cached] == [False, reuses, reuses]
    assert max(cached) < known


@pytest.mark.full
@pytest.mark.xdist_group("smollm2")
@pytest.mark.parametrize("manager", ["V2", "V1"])
def test_conversation_of_the_real_model_is_identical_to_one_process(manager: str) -> None:
    model = load_model("smollm2")
    with serving(model="smollm2", pools={"manager": manager}) as service:
        prompt = tuple(model.tokenizer.encode("The tides of the oceans are caused by the Moon. " * 12, chat=True))
        cold = service.ask(call_for(prompt, 24))
        turn_call = call_for((*prompt, *cold.tokens, *model.tokenizer.encode("And the Sun?", chat=True)), 24)
        turn = service.ask(turn_call)
        again = service.ask(call_for(prompt, 24))
        wait_until(service.is_idle, 10.0, "nobody uses any page")
    for call, answer in ((call_for(prompt, 24), cold), (turn_call, turn), (call_for(prompt, 24), again)):
        check_identical(model, call, answer)
    blocks = len(prompt) // TOKENS_PER_BLOCK * TOKENS_PER_BLOCK
    assert turn.summary.usage.cached_tokens == (len(prompt) if manager == "V2" else blocks)
    assert turn.summary.decode_cached_tokens == (len(prompt) + 23) // TOKENS_PER_BLOCK * TOKENS_PER_BLOCK
    assert again.summary.wire.num_pages == 1


def expected_pages(life_cycle: LifeCycle, prompt_tokens: int) -> int:
    """Pages outside the stale range, straight from the formula."""
    blocks = ceil_div(prompt_tokens, TOKENS_PER_BLOCK)
    stale = 0 if life_cycle.window is None else max(0, (prompt_tokens + 1 - life_cycle.window) // TOKENS_PER_BLOCK)
    return blocks - stale


def test_expected_pages_of_gemma3_at_1500_tokens_are_the_worked_numbers() -> None:
    # Window 512: (1500 + 1 - 512) // 32 = 30 of 47 blocks are stale.
    assert (expected_pages(LifeCycle(512), 1500), expected_pages(LifeCycle(), 1500)) == (17, 47)


def test_pool_groups_follow_from_model_and_manager(served: Served) -> None:
    statuses = served.service.statuses().values()
    assert {status.manager for status in statuses} == {served.manager}
    shapes = {tuple(group.life_cycles for group in status.pool_groups) for status in statuses}
    window = f"window {WINDOWS[served.model.name]}"
    shared = (served.model.name, served.manager) == ("tiny-gpt-oss", "V2")
    assert shapes == {((window, "full"),) if shared else ((window,), ("full",))}
