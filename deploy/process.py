"""How a kvferry process starts and ends: native libraries' settings, signals, exit codes, files it leaves."""

import asyncio
import contextlib
import ctypes
import io
import logging
import os
import signal
import sys
import tempfile
import unicodedata
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import NoReturn

from kvferry.cache.errors import ConfigError

EXIT_OK = 0
EXIT_DIFFERENT = 1
"""The demo's tokens differ from a single process."""
EXIT_FAILED = 2
"""It could not run, or could not go on: bad input, lost peers, a broken engine."""
EXIT_INTERRUPTED = 128 + signal.SIGINT
EXIT_NOBODY_READS = 128 + signal.SIGPIPE
"""What read the output closed the pipe."""

PARENT_VARIABLE = "KVFERRY_PARENT_PID"

_PR_SET_PDEATHSIG = 1
_KEPT_LETTERS = "\n\t\N{ZERO WIDTH JOINER}\N{ZERO WIDTH NON-JOINER}"
"""Not printable by Python's rule, but part of text: the joiners belong to emoji and to several scripts."""


class NobodyReads(Exception):
    """Whoever read standard output closed it. No error to talk about: the command just ends."""


class Terminated(Exception):
    """A signal other than SIGINT ended the command, and everything was cleaned up."""

    def __init__(self, number: int) -> None:
        super().__init__(f"ended by {signal.Signals(number).name}")
        self.number = number


def never_fail_to_encode() -> None:
    """From now on a character that the terminal cannot show is written as its escape, such as \\u20ac."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def say(text: str, end: str = "\n") -> None:
    """Write to standard output now.

    Raises:
        NobodyReads: the other end of the pipe is closed.
        ConfigError: it cannot be written, as when the disk is full.
    """
    try:
        print(text, end=end, flush=True)
    except BrokenPipeError:
        raise NobodyReads from None
    except OSError as error:
        raise ConfigError(f"the output cannot be written: {error.strerror}") from None


def printable(text: str) -> str:
    """Text that a terminal only shows: what is neither printable nor white space is written as its escape."""
    return "".join(letter if _is_shown(letter) else letter.encode("unicode_escape").decode() for letter in text)


def _is_shown(letter: str) -> bool:
    return letter.isprintable() or letter in _KEPT_LETTERS or unicodedata.category(letter) == "Zs"


@contextlib.contextmanager
def signals_deferred() -> Iterator[None]:
    """Inside, SIGINT, SIGTERM and SIGHUP wait; what came is raised again at the end. Main thread only.

    Handlers, and no signal mask: programs that are started inside would inherit the mask.
    """
    received: list[int] = []
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    handled = {number: handler for number, handler in before.items() if callable(handler)}
    for number in handled:
        signal.signal(number, lambda number, frame: received.append(number))
    try:
        yield
    finally:
        for number, handler in handled.items():
            signal.signal(number, handler)
        for came in received:
            signal.raise_signal(came)


@contextlib.contextmanager
def terminated_like_interrupted() -> Iterator[None]:
    """Inside, SIGTERM and SIGHUP do what Ctrl-C does; a signal that is ignored, as under nohup, stays ignored.

    Raises: Terminated: one of them came, and what was inside has ended.
    """
    received: list[int] = []

    def on_signal(number: int, frame: FrameType | None) -> None:
        received.append(number)
        interrupt = signal.getsignal(signal.SIGINT)  # asyncio puts its own there while it runs
        if not callable(interrupt):
            raise KeyboardInterrupt
        interrupt(signal.SIGINT, frame)

    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    handled = {number: handler for number, handler in before.items() if handler is not signal.SIG_IGN}
    for number in handled:
        signal.signal(number, on_signal)
    try:
        yield
    except KeyboardInterrupt:
        if received:
            raise Terminated(received[0]) from None
        raise
    finally:
        for number, handler in handled.items():
            signal.signal(number, handler)


def leave(code: int) -> NoReturn:
    """End the process with this exit code, after flushing, without running native destructors.

    Where the system has libibverbs, a process that made a NIXL agent dies of SIGSEGV in one of those destructors after
    all its work, which would turn every exit code into 139. Output that nobody reads any more changes nothing either.
    """
    try:
        for flush in (logging.shutdown, sys.stdout.flush, sys.stderr.flush):
            with contextlib.suppress(OSError, ValueError):
                flush()
    finally:
        os._exit(code)


def die_with_parent() -> None:
    """End with SIGKILL when the process named by KVFERRY_PARENT_PID ends, however it ends. Without it: nothing.

    To the kernel the parent is the thread that started this process: its end counts, too. Linux only; the variable is
    set by `deploy.cluster` for the processes it starts.
    Raises: ConfigError: the variable names no process, or one that is not the parent of this one (any more).
    """
    named = os.environ.get(PARENT_VARIABLE)
    if named is None:
        return
    if not (named.isascii() and named.isdigit()):
        raise ConfigError(f"{PARENT_VARIABLE} is {named!r}: it must be a process id; unset it to run without a parent")
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    parent = str(os.getppid())
    if parent != named:
        raise ConfigError(
            f"{PARENT_VARIABLE} is {named}, but the parent of this process is {parent}: the process that started it "
            "ended, or the variable was left over; unset it to run without a parent"
        )


def configure_logging(level: str) -> None:
    """One line per record on stderr."""
    logging.basicConfig(
        level=level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr, force=True
    )


def check_endpoint_file(path: Path) -> None:
    """Find out before the slow part of a start whether `write_endpoint` can work. Raises ConfigError."""
    if not os.path.isdir(path.parent):
        raise ConfigError(f"endpoint file {path}: there is no folder {path.parent}")
    if os.path.isdir(path):
        raise ConfigError(f"endpoint file {path}: it is a folder, the name of a file is needed")
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise ConfigError(f"endpoint file {path}: nothing can be written in the folder {path.parent}")


def write_endpoint(path: Path, endpoint: str) -> None:
    """Publish HOST:PORT in a file, whole or not at all, for whoever started this process. Raises ConfigError."""
    try:
        with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=path.name, delete=False) as file:
            file.write(endpoint + "\n")
        os.replace(file.name, path)
    except OSError as error:
        raise ConfigError(f"endpoint file {path}: cannot be written: {error.strerror}") from error


def serve(main: Callable[["asyncio.Event"], Awaitable[int]]) -> int:
    """Run an asyncio main function that stops when its event is set by SIGTERM or SIGINT.

    A second signal ends the process at once, with 130 for SIGINT and 143 for SIGTERM, whatever is unfinished.

    Returns: what `main` returned, or 130 when SIGINT stopped it and it ended well.
    """

    async def run() -> int:
        stop = asyncio.Event()
        interrupted = False

        def on_signal(number: int) -> None:
            nonlocal interrupted
            if stop.is_set():
                leave(128 + number)
            interrupted = number == signal.SIGINT
            stop.set()

        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, on_signal, number)
        code = await main(stop)
        return EXIT_INTERRUPTED if interrupted and code == EXIT_OK else code

    return asyncio.run(run())
