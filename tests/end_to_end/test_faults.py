"""Killed workers and interrupted commands: typed errors in time, nothing left behind."""

import asyncio
import os
import signal
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from kvferry.cache.errors import Unavailable
from kvferry.transfer.control.client import InferenceClient
from tests.end_to_end.programs import finish, shared_memory, start
from tests.end_to_end.serving import Answer, Service, both_managers, call_for, prompt_of, serving
from tests.helpers import wait_until
from tests.processes import command_line, started_processes

MODEL = "tiny-gpt-oss"
NOTICED_SECONDS = 15.0
INTERRUPT_SECONDS = 20.0
pytestmark = pytest.mark.xdist_group("faults")


def ask_in_background(pool: ThreadPoolExecutor, service: Service, **call: int) -> "Future[Answer]":
    return pool.submit(service.ask, call_for(prompt_of(call["prompt_tokens"]), call["max_new_tokens"]))


def kill(service: Service, name: str) -> float:
    """Kill a worker and forget it; returns when."""
    child = service.worker(name)
    child.process.kill()
    killed_at = time.monotonic()
    child.process.wait(10.0)
    service.cluster.children.remove(child)
    return killed_at


def is_running(service: Service, name: str) -> bool:
    status = service.statuses()[name]
    return status.running + status.waiting > 0


@both_managers
@pytest.mark.parametrize("victim", ["prefill-0", "decode-0"])
def test_worker_killed_during_a_request_gives_a_typed_error_in_time(victim: str, manager: str) -> None:
    # One token per chunk: the prompt takes seconds, and so does the answer.
    call = (
        {"prompt_tokens": 1500, "max_new_tokens": 8}
        if victim == "prefill-0"
        else {"prompt_tokens": 8, "max_new_tokens": 2000}
    )
    settings = {"prefill_chunk_tokens": 1, "pools": {"manager": manager}}
    with serving(model=MODEL, **settings) as service, ThreadPoolExecutor(1) as pool:
        reply = ask_in_background(pool, service, **call)
        wait_until(lambda: is_running(service, victim), 30.0, f"{victim} works on the request")
        killed_at = kill(service, victim)
        with pytest.raises(Unavailable):
            reply.result(NOTICED_SECONDS)
        assert time.monotonic() - killed_at < NOTICED_SECONDS
        wait_until(service.is_idle, 15.0, "nobody uses any page of the other worker")


@both_managers
def test_prompt_whose_decode_never_comes_is_released_after_hold_seconds(manager: str) -> None:
    with serving(model=MODEL, transfer={"hold_seconds": 1.0}, pools={"manager": manager}) as service:

        async def prefill_only() -> None:
            endpoint = service.worker("prefill-0").endpoint
            assert endpoint is not None
            async with InferenceClient(endpoint) as client:
                await client.prefill(call_for(prompt_of(100)))

        asyncio.run(prefill_only())
        assert service.statuses()["prefill-0"].holding == 1
        wait_until(service.is_idle, 10.0, "nobody uses the prompt's pages")


@both_managers
def test_client_that_goes_away_leaves_nothing_behind(manager: str) -> None:
    with serving(model=MODEL, pools={"manager": manager}) as service:

        async def leave_after_the_first_token() -> None:
            async with InferenceClient(service.endpoint) as client:
                stream = client.generate(call_for(prompt_of(200), 3000))
                await anext(stream)
                await stream.aclose()

        asyncio.run(leave_after_the_first_token())
        wait_until(service.is_idle, 10.0, "nobody uses any page")
        assert len(service.ask(call_for(prompt_of(50))).tokens) == 32


def children_of_demo(kind: str) -> list[int]:
    return [process.pid for process in started_processes() if f"kvferry {kind}" in command_line(process.pid)]


def test_demo_whose_worker_is_killed_while_starting_ends_with_one_line() -> None:
    demo = start("demo", "--model", MODEL, "--json")
    wait_until(lambda: len(children_of_demo("worker")) == 2, 60.0, "both workers are starting")
    os.kill(children_of_demo("worker")[0], signal.SIGKILL)
    ended = finish(demo)
    assert (ended.code, ended.out) == (2, "")
    assert len(ended.error_lines) == 1
    assert "ended with exit code -9" in ended.err


@pytest.mark.parametrize(
    "moment, number, code, words",
    [
        ("starting", signal.SIGTERM, 143, "kvferry: ended by SIGTERM"),
        ("serving", signal.SIGINT, 130, "kvferry: interrupted"),
    ],
)
def test_demo_ended_by_a_signal_leaves_nothing_behind(
    tmp_path: Path, moment: str, number: int, code: int, words: str
) -> None:
    before = shared_memory()
    demo = start("demo", "--model", MODEL, "--max-new-tokens", "3000", environ={"TMPDIR": str(tmp_path)})
    assert demo.stdout is not None
    if moment == "starting":
        wait_until(lambda: len(children_of_demo("worker")) == 2, 60.0, "both workers are starting")
    else:
        demo.stdout.read(1)
    demo.send_signal(number)
    ended = finish(demo, INTERRUPT_SECONDS)
    assert ended.code == code
    assert ended.error_lines[-1] == words
    assert not started_processes()
    assert list(tmp_path.glob("kvferry-*")) == []
    assert shared_memory() <= before


def test_killed_demo_takes_its_workers_with_it() -> None:
    demo = start("demo", "--model", MODEL, "--json")
    wait_until(lambda: len(children_of_demo("worker")) == 2, 60.0, "both workers are starting")
    demo.kill()
    finish(demo)
    wait_until(lambda: not started_processes(), 10.0, "frontend and workers ended with the demo")
    assert not started_processes()
