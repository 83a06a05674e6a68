"""Mistakes on the command line, told in one line before anything slow happens."""

import asyncio
import os
from collections.abc import Callable
from typing import Any

import pytest

from kvferry.cache.errors import ConfigError
from kvferry.deploy.cli import app, exit_code

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


def raising(error: BaseException) -> Callable[[], Any]:
    def command() -> None:
        raise error

    return command


@pytest.mark.parametrize(
    "error, code, words",
    [
        (ConfigError("this\nand that"), 2, "kvferry: error: this and that"),
        (asyncio.CancelledError(), 2, "kvferry: error: the call was cancelled from inside before it ended"),
        (BrokenPipeError(), 2, "kvferry: error: nobody reads the output any more"),
        (KeyboardInterrupt(), 130, "kvferry: interrupted"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_error_becomes_one_line_and_an_exit_code(
    capsys: pytest.CaptureFixture[str], error: BaseException, code: int, words: str
) -> None:
    assert exit_code(raising(error)) == code
    assert capsys.readouterr().err == words + "\n"


def test_unexpected_error_shows_where_and_is_no_verdict(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code(raising(ZeroDivisionError("a bug"))) == 2
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize("result, code", [(None, 0), (0, 0), (1, 1), (2, 2)])
def test_result_of_a_command_is_its_exit_code(result: int | None, code: int) -> None:
    assert exit_code(lambda: result) == code
