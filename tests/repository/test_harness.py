"""The test suite's own tools: leftover processes, waiting, and the exit status of a process that used NIXL."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers import wait_until
from tests.processes import command_line, end, started_processes
from tests.repository.sources import ROOT

# Registers an exit routine that is no code, so that an ordinary exit of the process ends in SIGSEGV.
CRASHING_TEST = """
import ctypes
import nixl

def test_it():
    assert ctypes.CDLL(None).__cxa_atexit(ctypes.c_void_p(8), None, None) == 0
    assert {passes}
"""


def inner_pytest(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Run pytest with this suite's conftest over another folder."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src"), str(folder)])}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.conftest", "-p", "no:cacheprovider", *options, "."]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("passes, expected", [(True, 0), (False, 1)])
@pytest.mark.parametrize("options", [(), ("-n", "1")], ids=["alone", "xdist"])
def test_exit_status_is_of_the_tests_where_exit_would_crash(
    tmp_path: Path, options: tuple[str, ...], passes: bool, expected: int
) -> None:
    (tmp_path / "nixl.py").touch()
    (tmp_path / "test_crashing.py").write_text(CRASHING_TEST.format(passes=passes))

    result = inner_pytest(tmp_path, *options)

    assert result.returncode == expected, result.stdout + result.stderr
    assert f"1 {'passed' if passes else 'failed'}" in result.stdout
    assert "crashed" not in result.stdout


def test_left_process_fails_the_test_and_is_ended(tmp_path: Path) -> None:
    command = f"sleep 1000{os.getpid()}"
    (tmp_path / "test_leaving.py").write_text(
        "import subprocess\n"
        "def test_it():\n"
        f"    subprocess.run(['sh', '-c', '{command} &'], check=True, stdout=subprocess.DEVNULL)\n"
    )

    result = inner_pytest(tmp_path)

    assert result.returncode == 1
    assert "1 passed, 1 error" in result.stdout
    assert "the test left processes behind" in result.stdout
    assert command in result.stdout
    assert command not in {command_line(int(name)) for name in os.listdir("/proc") if name.isdigit()}


def test_started_processes_sees_child_and_end_ends_it() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        found = [process for process in started_processes() if process.pid == child.pid]
        assert found
        assert set(end(set(found), 0.01)) == set(found)
        assert child.wait(10) < 0
    assert not set(found) & started_processes()


def test_end_of_process_that_ends_itself_reports_nothing() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as child:
        found = {process for process in started_processes() if process.pid == child.pid}
        assert end(found, 30) == {}


def test_wait_until_never_true_names_what() -> None:
    with pytest.raises(AssertionError, match=r"^not within 0\.01 s: the moon$"):
        wait_until(lambda: False, 0.01, "the moon")


@pytest.mark.xdist_group("harness")
def test_groups_of_tests_are_known_to_the_processes_that_share_them(request: pytest.FixtureRequest) -> None:
    """Else every process starts every cluster: pytest-xdist marks a grouped test in its name."""
    assert not request.config.getoption("loadgroup", False) or request.node.nodeid.endswith("@harness")
