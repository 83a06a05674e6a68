"""Disaggregated output equals one process, over NIXL, for models with the real windows."""

from collections.abc import Iterator

import pytest

from kvferry.cache.layout import build_layout
from kvferry.cache.lifecycle import LifeCycle, ceil_div
from kvferry.transfer.engines.loaded_model import LoadedModel
from kvferry.transfer.engines.models import load_model
from kvferry.transfer.engines.oracle import generate_in_one_process
from kvferry.transfer.inference import GenerateCall
from tests.end_to_end.serving import CHUNK_TOKENS, Answer, Service, call_for, prompt_of, serving
from tests.helpers import wait_until

LENGTHS = (1, 31, 32, 33, 127, 128, 129, 159, 160, 511, 512, 513, 543, 544, 1500)
MODELS = ("tiny-gpt-oss", "tiny-gemma3")
TOKENS_PER_BLOCK = 32
# Sums may be taken in another order by another process; a wrong page moves a log-probability by far more.
LOGPROB_TOLERANCE = 1e-5


@pytest.fixture(scope="module", params=[pytest.param(m, marks=pytest.mark.xdist_group(m)) for m in MODELS])
def model(request: pytest.FixtureRequest) -> LoadedModel:
    return load_model(request.param)


@pytest.fixture(scope="module")
def service(model: LoadedModel) -> Iterator[Service]:
    with serving(model=model.name) as running:
        yield running


def check_identical(model: LoadedModel, call: GenerateCall, answer: Answer) -> None:
    assert call.prompt_token_ids is not None
    expected = generate_in_one_process(model, call.prompt_token_ids, call.sampling, CHUNK_TOKENS)
    assert answer.tokens == tuple(expected.token_ids)
    assert answer.logprobs == pytest.approx(expected.logprobs, abs=LOGPROB_TOLERANCE)
    assert answer.summary.new_tokens == call.sampling.max_new_tokens == len(answer.tokens)


@pytest.mark.parametrize("num_tokens", LENGTHS)
def test_greedy_answer_is_identical_to_one_process(model: LoadedModel, service: Service, num_tokens: int) -> None:
    call = call_for(prompt_of(num_tokens))
    answer = service.ask(call)
    check_identical(model, call, answer)
    assert answer.summary.sender.name == "prefill-0"
    assert answer.summary.receiver.name == "decode-0"
    wait_until(service.is_idle, 10.0, "every page is free again")


def test_seeded_answer_is_identical_to_one_process(model: LoadedModel, service: Service) -> None:
    calls = [call_for(prompt_of(200), temperature=1.0, seed=seed) for seed in (1, 2)]
    answers = service.ask_all(calls)
    for call, answer in zip(calls, answers, strict=True):
        check_identical(model, call, answer)
    assert answers[0].tokens != answers[1].tokens


def test_sixteen_concurrent_requests_are_identical_to_one_process(model: LoadedModel, service: Service) -> None:
    lengths = (*LENGTHS, 700)
    calls = [call_for(prompt_of(num_tokens, seed=1)) for num_tokens in lengths]
    answers = service.ask_all(calls)
    for call, answer in zip(calls, answers, strict=True):
        check_identical(model, call, answer)
    wait_until(service.is_idle, 10.0, "every page is free again")


def test_single_token_answer_needs_no_decode_step(model: LoadedModel, service: Service) -> None:
    call = call_for(prompt_of(40), max_new_tokens=1)
    answer = service.ask(call)
    check_identical(model, call, answer)
    assert answer.summary.timings.first_decode_step_seconds == 0.0


def test_transfer_is_nixl_and_moves_one_run_per_page(model: LoadedModel, service: Service) -> None:
    layout = build_layout(model.spec, tokens_per_block=TOKENS_PER_BLOCK)
    answer = service.ask(call_for(prompt_of(1500)))
    wire = answer.summary.wire
    pages = [expected_pages(group.life_cycle, 1500) for group in layout.life_cycles]
    assert {status.transport for status in service.statuses().values()} == {"NIXL"}
    assert wire.lane == "cma"
    assert wire.num_pages == sum(pages)
    assert wire.num_bytes == sum(n * group.slot_bytes for n, group in zip(pages, layout.life_cycles, strict=True))
    # One run per page; runs of slots that step together on both sides merge. How many merge depends on how the chunks
    # of the two sides interleaved their life cycles in a shared pool.
    assert len(layout.life_cycles) <= wire.num_descriptors <= wire.num_pages // 4
    assert wire.num_slices == 1


def expected_pages(life_cycle: LifeCycle, prompt_tokens: int) -> int:
    """Pages outside the stale range, straight from the formula."""
    blocks = ceil_div(prompt_tokens, TOKENS_PER_BLOCK)
    stale = 0 if life_cycle.window is None else max(0, (prompt_tokens + 1 - life_cycle.window) // TOKENS_PER_BLOCK)
    return blocks - stale


@pytest.mark.xdist_group("tiny-gemma3")
def test_expected_pages_of_gemma3_at_1500_tokens_are_the_worked_numbers() -> None:
    # Window 512: (1500 + 1 - 512) // 32 = 30 of 47 blocks are stale.
    assert (expected_pages(LifeCycle(512), 1500), expected_pages(LifeCycle(), 1500)) == (17, 47)


def test_pool_groups_follow_from_the_model(model: LoadedModel, service: Service) -> None:
    groups = service.statuses()["decode-0"].pool_groups
    shapes = [group.life_cycles for group in groups]
    expected = {"tiny-gpt-oss": [("window 128", "full")], "tiny-gemma3": [("window 512",), ("full",)]}
    assert shapes == expected[model.name]
