"""How processes end: exit codes, signals, parents, files."""

import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from kvferry.cache.errors import ConfigError
from kvferry.deploy.process import NobodyReads, check_endpoint_file, printable, say, signals_deferred, write_endpoint

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
COMMAND = """
import asyncio, signal, sys
from kvferry.deploy.process import Terminated, terminated_like_interrupted

for name in sys.argv[2:]:
    signal.signal(getattr(signal, name), signal.SIG_IGN)

async def forever():
    print("running", flush=True)
    await asyncio.Event().wait()

def wait():
    print("running", flush=True)
    signal.pause()

try:
    with terminated_like_interrupted():
        try:
            asyncio.run(forever()) if sys.argv[1] == "asyncio" else wait()
        finally:
            print("cleaned up", flush=True)
except Terminated as error:
    sys.exit(128 + error.number)
except KeyboardInterrupt:
    sys.exit(130)
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


@pytest.mark.parametrize("waiting", ["asyncio", "plain"])
@pytest.mark.parametrize("number, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_signal_that_ends_a_command_lets_it_clean_up(waiting: str, number: int, code: int) -> None:
    check_cleaned_up(start(COMMAND, waiting), number, code)


@pytest.mark.parametrize("waiting", ["asyncio", "plain"])
def test_command_that_ignores_ctrl_c_still_ends_by_sigterm(waiting: str) -> None:
    check_cleaned_up(start(COMMAND, waiting, "SIGINT"), signal.SIGTERM, 143)


def test_signal_that_is_ignored_stays_ignored() -> None:
    process = start(COMMAND, "asyncio", "SIGHUP")
    assert read_line(process) == "running"
    process.send_signal(signal.SIGHUP)
    process.send_signal(signal.SIGTERM)
    assert ended(process) == 143


def check_cleaned_up(process: "subprocess.Popen[str]", number: int, code: int) -> None:
    assert read_line(process) == "running"
    process.send_signal(number)
    assert read_line(process) == "cleaned up"
    assert ended(process) == code


def test_signals_that_are_deferred_come_at_the_end() -> None:
    reached: list[int] = []

    def raise_inside() -> None:
        with signals_deferred():
            signal.raise_signal(signal.SIGINT)
            reached.append(signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            raise_inside()
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
    assert reached == [signal.SIGINT]


def test_say_to_a_full_disk_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    with open("/dev/full", "w", buffering=1) as full:
        monkeypatch.setattr(sys, "stdout", full)
        with pytest.raises(ConfigError, match=r"^the output cannot be written: No space left on device$"):
            say("words")
        monkeypatch.undo()
        with pytest.raises(OSError, match="No space left"):
            full.close()


def test_say_to_a_closed_pipe_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    pipe = os.fdopen(writing, "w")
    monkeypatch.setattr(sys, "stdout", pipe)
    with pytest.raises(NobodyReads):
        say("words")
    monkeypatch.undo()
    with pytest.raises(BrokenPipeError):
        pipe.close()


@pytest.mark.parametrize(
    "text, shown",
    [
        ("plain\n\ttext", "plain\n\ttext"),
        ("\x1b[2J\r\x00\x9b", "\\x1b[2J\\r\\x00\\x9b"),
        ("caf\u00e9 \u6c34 \U0001f468\u200d\U0001f373 \ufffd", "caf\u00e9 \u6c34 \U0001f468\u200d\U0001f373 \ufffd"),
        ("a\u00a0b\u3000c", "a\u00a0b\u3000c"),
        ("\u202egnp.exe", "\\u202egnp.exe"),
    ],
)
def test_printable_keeps_text_and_escapes_the_rest(text: str, shown: str) -> None:
    assert printable(text) == shown


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
