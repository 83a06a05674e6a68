"""Settings of every test process: environment, exit status, leftover processes, property-test profiles."""

import atexit
import logging
import os
import secrets
import sys
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

from tests.processes import RUN_VARIABLE, end, started_processes

# Read by libraries when they are imported and by every program a test starts.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("NIXL_LOG_LEVEL", "ERROR")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ[RUN_VARIABLE] = f"{os.getpid()}-{secrets.token_hex(4)}"

_SOURCES = str(Path(__file__).parents[1] / "src")
if _SOURCES not in os.environ.get("PYTHONPATH", "").split(os.pathsep):
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [_SOURCES, os.environ.get("PYTHONPATH")]))

hypothesis.settings.register_profile("default", deadline=None)
hypothesis.settings.register_profile("ci", deadline=None, derandomize=True, database=None)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "default")

_PROCESS_GRACE_SECONDS = 5.0
_sessions: list[pytest.Session] = []


def pytest_sessionstart(session: pytest.Session) -> None:
    _sessions.append(session)


def _leave_before_native_destructors() -> None:
    """End the process with pytest's exit status, skipping the destructors of native libraries.

    Where the system has libibverbs, a process that made a NIXL agent dies of SIGSEGV in one of those destructors, after
    all its work. Registered first, so run last of all exit handlers.
    """
    if _sessions and any(name in sys.modules for name in ("nixl", "nixl_cu12", "nixl_cu13")):
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(int(_sessions[0].exitstatus))


atexit.register(_leave_before_native_destructors)


@pytest.fixture(autouse=True)
def no_process_left() -> Iterator[None]:
    """Fail a test that leaves behind a process it started; those of wider fixtures are older and may stay."""
    before = started_processes()
    yield
    left = started_processes() - before
    if left:
        killed = end(left, _PROCESS_GRACE_SECONDS)
        assert not killed, f"the test left processes behind: {sorted(killed.items())}"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Show what explorations covered: a number that falls is a test that got weaker."""
    reports = terminalreporter.getreports("passed")
    lines = [
        f"{report.nodeid}: {value}"
        for report in reports
        for name, value in report.user_properties
        if name == "explored"
    ]
    if lines:
        terminalreporter.section("explored")
        terminalreporter.write_line("\n".join(lines))
