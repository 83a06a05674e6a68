"""How processes end: exit codes, signals, parents, files."""

import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from kvferry.cache.errors import ConfigError
from kvferry.deploy.process import check_endpoint_file, write_endpoint

SERVING = """
import asyncio, sys
from kvferry.deploy.process import leave, serve

async def main(stop):
    print("serving", flush=True)
    await stop.wait()
    print("stopping", flush=True)
    if "stuck" in sys.argv:
        await asyncio.Event().wait()
    return 0

leave(serve(main))
"""
LEAVING = "import sys; from kvferry.deploy.process import leave; print('words'); leave(3)"
WITH_PARENT = """
from kvferry.cache.errors import ConfigError
from kvferry.deploy.process import die_with_parent
try:
    die_with_parent()
except ConfigError as error:
    raise SystemExit(str(error))
"""


def start(script: str, *arguments: str, environ: Mapping[str, str] | None = None) -> "subprocess.Popen[str]":
    command = (sys.executable, "-c", script, *arguments)
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env={**os.environ, **(environ or {})})


def read_line(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def ended(process: "subprocess.Popen[str]") -> int:
    try:
        process.communicate(timeout=20.0)
    finally:
        process.kill()
    return process.returncode


@pytest.mark.parametrize("number, code", [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_first_signal_lets_the_process_stop(number: int, code: int) -> None:
    process = start(SERVING)
    assert read_line(process) == "serving"
    process.send_signal(number)
    assert ended(process) == code


@pytest.mark.parametrize("first", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("second, code", [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_second_signal_ends_the_process_at_once(first: int, second: int, code: int) -> None:
    process = start(SERVING, "stuck")
    assert read_line(process) == "serving"
    process.send_signal(first)
    assert read_line(process) == "stopping"
    process.send_signal(second)
    assert ended(process) == code


def test_exit_code_survives_output_that_nobody_reads() -> None:
    process = start(LEAVING, environ={"PYTHONUNBUFFERED": ""})
    assert process.stdout is not None
    process.stdout.close()
    process.stdout = None
    assert ended(process) == 3


@pytest.mark.parametrize("named, words", [("12x", "'12x': it must be a process id"), ("", "must be a process id")])
def test_parent_that_is_no_process_id_is_refused(named: str, words: str) -> None:
    check_refused(named, words)


def test_parent_that_is_somebody_else_is_refused() -> None:
    check_refused("1", f"is 1, but the parent of this process is {os.getpid()}")


def check_refused(named: str, words: str) -> None:
    process = start(WITH_PARENT, environ={"KVFERRY_PARENT_PID": named})
    _, err = process.communicate(timeout=20.0)
    assert words in err
    assert len(err.splitlines()) == 1


def test_endpoint_file_is_written_whole(tmp_path: Path) -> None:
    check_endpoint_file(tmp_path / "endpoint")
    write_endpoint(tmp_path / "endpoint", "127.0.0.1:5")
    assert [path.name for path in tmp_path.iterdir()] == ["endpoint"]
    assert (tmp_path / "endpoint").read_text() == "127.0.0.1:5\n"


def test_endpoint_file_that_cannot_be_written_is_refused_before_and_at_writing(tmp_path: Path) -> None:
    for path, words in ((tmp_path / "none" / "x", "there is no folder"), (tmp_path, "it is a folder")):
        with pytest.raises(ConfigError, match=words):
            check_endpoint_file(path)
    with pytest.raises(ConfigError, match="cannot be written"):
        write_endpoint(tmp_path / "none" / "x", "127.0.0.1:5")
