"""How a kvferry process starts and ends: native libraries' settings, signals, exit codes, files it leaves."""

import asyncio
import ctypes
import logging
import os
import signal
import sys
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import NoReturn

EXIT_OK = 0
EXIT_DIFFERENT = 1
"""The demo's tokens differ from a single process."""
EXIT_FAILED = 2
"""It could not run, or could not go on: bad input, lost peers, a broken engine."""
EXIT_INTERRUPTED = 130

PARENT_VARIABLE = "KVFERRY_PARENT_PID"

_PR_SET_PDEATHSIG = 1


def leave(code: int) -> NoReturn:
    """End the process with this exit code, after flushing, without running native destructors.

    Where the system has libibverbs, a process that made a NIXL agent dies of SIGSEGV in one of those destructors after
    all its work, which would turn every exit code into 139.
    """
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def die_with_parent() -> None:
    """End with SIGKILL when the process named by KVFERRY_PARENT_PID ends, however it ends. Without it: nothing.

    Linux only; the variable is set by `deploy.cluster` for the processes it starts.
    """
    parent = os.environ.get(PARENT_VARIABLE)
    if parent is None:
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(parent):
        leave(EXIT_FAILED)


def configure_logging(level: str) -> None:
    """One line per record on stderr."""
    logging.basicConfig(
        level=level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr, force=True
    )


def write_endpoint(path: Path, endpoint: str) -> None:
    """Publish HOST:PORT in a file, whole or not at all, for whoever started this process."""
    with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=path.name, delete=False) as file:
        file.write(endpoint + "\n")
    os.replace(file.name, path)


def serve(main: Callable[["asyncio.Event"], Awaitable[int]]) -> int:
    """Run an asyncio main function that stops when its event is set by SIGTERM or SIGINT.

    Returns: what `main` returned, or 130 when SIGINT stopped it and it ended well.
    """

    async def run() -> int:
        stop = asyncio.Event()
        interrupted = False

        def on_signal(number: int) -> None:
            nonlocal interrupted
            interrupted = interrupted or number == signal.SIGINT
            stop.set()

        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, on_signal, number)
        code = await main(stop)
        return EXIT_INTERRUPTED if interrupted and code == EXIT_OK else code

    return asyncio.run(run())
