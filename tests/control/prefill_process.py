"""A prefill worker in a process of its own: prints its address, then serves until it is killed."""

import asyncio
import sys

from kvferry.transfer.types import Role
from tests.control import samples
from tests.control.worlds import Worker, workers


async def main(keepalive_seconds: float) -> None:
    worker = Worker(samples.PREFILL, Role.PREFILL, keepalive_seconds)
    async with workers(worker):
        print(worker.server.address, flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(float(sys.argv[1])))
