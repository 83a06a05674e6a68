"""Mistakes on the command line, told in one line before anything slow happens."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from kvferry.cache.errors import ConfigError
from kvferry.deploy.cli import app, exit_code
from kvferry.deploy.process import NobodyReads, Terminated

GENERATE = ("generate", "--frontend", "127.0.0.1:1", "--prompt", "hello")
STATUS = ("status", "--worker", "127.0.0.1:1")
DIRECTORY = ("--directory", "127.0.0.1:1")


def told(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line that a refused command says."""
    assert exit_code(lambda: app(list(arguments), standalone_mode=False)) == 2
    out, err = capsys.readouterr()
    assert out == ""
    lines = err.splitlines()
    assert len(lines) == 1, err
    assert lines[0].startswith("kvferry: error: ")
    return lines[0].removeprefix("kvferry: error: ")


def test_unknown_log_level_names_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    line = told(capsys, "frontend", "--log-level", "foo")
    assert line == "Invalid value for '--log-level': 'foo' is not one of 'debug', 'info', 'warning', 'error'."


@pytest.mark.parametrize("command", [("frontend",), ("worker", "--role", "decode", *DIRECTORY)])
def test_endpoint_file_without_a_folder_is_refused(
    capsys: pytest.CaptureFixture[str], command: tuple[str, ...]
) -> None:
    line = told(capsys, *command, "--endpoint-file", "/nonexist/x", "--log-level", "INFO")
    assert line == "endpoint file /nonexist/x: there is no folder /nonexist"


@pytest.mark.parametrize("value", ["many", "1.5", ""])
def test_number_that_is_none_is_named(capsys: pytest.CaptureFixture[str], value: str) -> None:
    line = told(capsys, "demo", "--max-new-tokens", value)
    assert "'--max-new-tokens'" in line
    assert line.endswith(f"(given: {value!r})")


@pytest.mark.parametrize("command", [("demo",), ("generate", "--frontend", "127.0.0.1:1")])
def test_prompt_that_is_no_text_is_refused(capsys: pytest.CaptureFixture[str], command: tuple[str, ...]) -> None:
    line = told(capsys, *command, "--prompt", os.fsdecode(b"caf\xe9"))
    assert line == "the prompt is not valid UTF-8, from character 3 on: fix --prompt"


@pytest.mark.parametrize(
    "command, flag, value, rule",
    [
        (("demo",), "--max-new-tokens", "0", "from 1 to 2097152"),
        (("demo",), "--prefill", "0", "from 1 to 64"),
        (("demo",), "--decode", "-1", "from 1 to 64"),
        (("demo",), "--decode", "65", "from 1 to 64"),
        (GENERATE, "--max-new-tokens", "0", "from 1 to 2097152"),
        (GENERATE, "--max-new-tokens", "2097153", "from 1 to 2097152"),
        (GENERATE, "--temperature", "-1", "from 0 to 1000"),
        (GENERATE, "--temperature", "nan", "from 0 to 1000"),
        (GENERATE, "--temperature", "inf", "from 0 to 1000"),
        (GENERATE, "--seed", "-1", "from 0 to 9223372036854775807"),
        (GENERATE, "--seed", "9223372036854775808", "from 0 to 9223372036854775807"),
        (GENERATE, "--timeout", "0", "a number of seconds above 0, at most 604800"),
        (GENERATE, "--timeout", "inf", "a number of seconds above 0, at most 604800"),
        (GENERATE, "--wait", "nan", "a number of seconds above 0, at most 604800"),
        (STATUS, "--timeout", "nan", "a number of seconds above 0, at most 604800"),
        (STATUS, "--timeout", "-2.5", "a number of seconds above 0, at most 604800"),
    ],
)
def test_number_out_of_bounds_is_refused_at_once(
    capsys: pytest.CaptureFixture[str], command: tuple[str, ...], flag: str, value: str, rule: str
) -> None:
    assert told(capsys, *command, flag, value) == f"{flag} is {value}: it must be {rule}"


def test_wait_for_a_frontend_that_never_comes_ends_in_time(capsys: pytest.CaptureFixture[str]) -> None:
    line = told(capsys, *GENERATE, "--wait", "0.2")
    assert line.startswith("127.0.0.1:1: not serving after 0.2 s: ")


def test_no_command_shows_the_help_in_its_own_lines(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code(lambda: app([], standalone_mode=False)) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("Usage: ")
    assert [line.split()[0] for line in err.splitlines()[-5:]] == ["demo", "worker", "frontend", "generate", "status"]


@pytest.mark.parametrize(
    "command, key", [("worker", "pools.quota_bytes=512MiB"), ("frontend", "max_inflight_requests=64")]
)
def test_help_names_a_key_of_its_own_process(capsys: pytest.CaptureFixture[str], command: str, key: str) -> None:
    assert exit_code(lambda: app([command, "--help"], standalone_mode=False)) == 0
    assert key in capsys.readouterr().out


def test_output_that_cannot_be_written_is_one_line() -> None:
    with open("/dev/full", "w") as full:
        ended = run("--help", stdout=full)
    assert (ended.returncode, ended.stderr) == (
        2,
        "kvferry: error: the system refused: [Errno 28] No space left on device\n",
    )


def test_output_that_nobody_reads_ends_the_command_quietly() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as closed:
        ended = run("--help", stdout=closed)
    assert (ended.returncode, ended.stderr) == (141, "")


def test_letter_that_the_terminal_does_not_have_is_escaped() -> None:
    ended = run("frontend", "--listen", "caf\u00e9", PYTHONIOENCODING="ascii:strict")
    assert (ended.returncode, ended.stdout) == (2, "")
    assert "caf\\xe9" in ended.stderr
    assert len(ended.stderr.splitlines()) == 1


def run(*arguments: str, stdout: Any = subprocess.PIPE, **environ: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        (sys.executable, "-m", "kvferry", *arguments),
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **environ},
        timeout=30.0,
        check=False,
    )


def raising(error: BaseException) -> Callable[[], Any]:
    def command() -> None:
        raise error

    return command


@pytest.mark.parametrize(
    "error, code, words",
    [
        (ConfigError("this\nand that"), 2, "kvferry: error: this and that"),
        (asyncio.CancelledError(), 2, "kvferry: error: the call was cancelled from inside before it ended"),
        (OSError(28, "No space left"), 2, "kvferry: error: the system refused: [Errno 28] No space left"),
        (KeyboardInterrupt(), 130, "kvferry: interrupted"),
        (Terminated(signal.SIGTERM), 143, "kvferry: ended by SIGTERM"),
        (Terminated(signal.SIGHUP), 129, "kvferry: ended by SIGHUP"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_error_becomes_one_line_and_an_exit_code(
    capsys: pytest.CaptureFixture[str], error: BaseException, code: int, words: str
) -> None:
    assert exit_code(raising(error)) == code
    assert capsys.readouterr().err == words + "\n"


@pytest.mark.parametrize("error", [NobodyReads(), BrokenPipeError(), SystemExit(1)])
def test_closed_pipe_is_an_exit_code_and_no_words(capsys: pytest.CaptureFixture[str], error: BaseException) -> None:
    assert exit_code(raising(error)) == 141
    assert capsys.readouterr().err == ""


def test_unexpected_error_shows_where_and_is_no_verdict(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code(raising(ZeroDivisionError("a bug"))) == 2
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize("result, code", [(None, 0), (0, 0), (1, 1), (2, 2)])
def test_result_of_a_command_is_its_exit_code(result: int | None, code: int) -> None:
    assert exit_code(lambda: result) == code
