"""Peers that die or stop without a word."""

import asyncio
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from kvferry.transfer.types import Role
from tests.control import samples
from tests.control.worlds import Worker, run, wait_until, workers

KEEPALIVE_SECONDS = 0.5


@asynccontextmanager
async def prefill_process() -> AsyncIterator[tuple[Process, str]]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.control.prefill_process", str(KEEPALIVE_SECONDS)),
        stdout=PIPE,
        cwd=Path(__file__).parents[2],
    )
    assert process.stdout is not None
    try:
        yield process, (await process.stdout.readline()).decode().strip()
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_silent_peer_is_noticed_within_two_keepalives(how: signal.Signals) -> None:
    async def test() -> None:
        decode = Worker(samples.DECODE, Role.DECODE, KEEPALIVE_SECONDS)
        async with prefill_process() as (process, address), workers(decode):
            await decode.network.connect(samples.entry(samples.PREFILL, address))
            await wait_until(lambda: decode.sink.up, "the channel is up")
            process.send_signal(how)
            loop = asyncio.get_running_loop()
            stopped_at = loop.time()
            await wait_until(lambda: decode.sink.lost, "the loss is noticed")
            assert loop.time() - stopped_at < 2 * KEEPALIVE_SECONDS + 2
            assert not decode.network.send(samples.PREFILL, samples.grant())

    run(test)
