"""More than one worker of a role, and workers with both."""

import itertools

import pytest

from kvferry.transfer.engines.models import load_model
from kvferry.transfer.engines.oracle import generate_in_one_process
from tests.end_to_end.serving import (
    CHUNK_TOKENS,
    Answer,
    Service,
    both_managers,
    call_for,
    prompt_of,
    serving,
    wait_paired,
)
from tests.helpers import wait_until

MODEL = "tiny-gpt-oss"
pytestmark = pytest.mark.xdist_group("topologies")


def check_identical(answers: list[Answer], prompts: list[tuple[int, ...]]) -> None:
    model = load_model(MODEL)
    for prompt, answer in zip(prompts, answers, strict=True):
        sampling = call_for(prompt).sampling
        assert answer.tokens == generate_in_one_process(model, prompt, sampling, CHUNK_TOKENS).token_ids


@both_managers
def test_two_by_two_requests_spread_over_every_pair(manager: str) -> None:
    prompts = [prompt_of(100 + index) for index in range(12)]
    with serving(2, 2, model=MODEL, pools={"manager": manager}) as service:
        answers = service.ask_all([call_for(prompt) for prompt in prompts])
        wait_until(service.is_idle, 10.0, "nobody uses any page")
    check_identical(answers, prompts)
    used = {(answer.summary.sender.name, answer.summary.receiver.name) for answer in answers}
    assert used == set(itertools.product(("prefill-0", "prefill-1"), ("decode-0", "decode-1")))


@both_managers
def test_role_both_answers_alone_without_moving_anything(manager: str) -> None:
    prompts = [prompt_of(300), prompt_of(20)]
    with serving(0, 0, model=MODEL) as service:
        start_worker(service, "both-0", "both", manager)
        answers = service.ask_all([call_for(prompt) for prompt in prompts])
        wait_until(service.is_idle, 10.0, "nobody uses any page")
    check_identical(answers, prompts)
    for answer in answers:
        assert answer.summary.sender == answer.summary.receiver
        assert answer.summary.wire.num_bytes == 0


@both_managers
def test_role_both_prefills_for_a_decode_worker(manager: str) -> None:
    prompts = [prompt_of(100 + index) for index in range(6)]
    with serving(0, 1, model=MODEL, wait=False, pools={"manager": manager}) as service:
        start_worker(service, "both-0", "both", manager)
        wait_paired(service)
        answers = service.ask_all([call_for(prompt) for prompt in prompts])
        wait_until(service.is_idle, 10.0, "nobody uses any page")
    check_identical(answers, prompts)
    receivers = {answer.summary.receiver.name for answer in answers}
    assert receivers == {"both-0", "decode-0"}


def start_worker(service: Service, name: str, role: str, manager: str) -> None:
    settings = {
        "model": MODEL,
        "role": role,
        "name": name,
        "directory": service.endpoint,
        "prefill_chunk_tokens": CHUNK_TOKENS,
        "pools": {"manager": manager},
    }
    child = service.cluster.start("worker", name, settings)
    service.cluster.wait_endpoint(child, 90.0)
    wait_paired(service)
