"""The command line: `kvferry demo | worker | frontend | generate | status`."""

import asyncio
import json
import math
import os
import sys
import traceback
from collections.abc import Callable
from contextlib import aclosing, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn

import typer
from pydantic import ValidationError
from typer.exceptions import Abort, Exit, TyperException

from kvferry.cache.errors import ConfigError, KVError
from kvferry.deploy.config import FrontendConfig, WorkerConfig, load
from kvferry.deploy.process import (
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_NOBODY_READS,
    EXIT_OK,
    NobodyReads,
    Terminated,
    check_endpoint_file,
    configure_logging,
    die_with_parent,
    leave,
    never_fail_to_encode,
    printable,
    say,
    serve,
    terminated_like_interrupted,
)
from kvferry.transfer.control.client import InferenceClient
from kvferry.transfer.control.convert.checks import MAX_DURATION_SECONDS
from kvferry.transfer.control.convert.common import MAX_TOKENS
from kvferry.transfer.control.convert.inference import MAX_SALT_CHARS, MAX_TEMPERATURE
from kvferry.transfer.inference import GenerateCall, SamplingParams, TokenChunk

app = typer.Typer(
    name="kvferry",
    help="Move the KV cache of a prompt from the worker that computed it to the worker that decodes it.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

MAX_SEED = (1 << 63) - 1
MANAGERS = ("V1", "V2")
MAX_WORKERS = 64
"""Of one role in the demo; each is a process with a copy of the model."""

Config = Annotated[
    Path | None, typer.Option("--config", metavar="PATH", help="YAML file with the configuration; keys as for --set.")
]
Listen = Annotated[
    str | None, typer.Option("--listen", metavar="HOST:PORT", help="Where to serve; port 0 takes a free one.")
]
WorkerSetting = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Set any configuration key, e.g. pools.quota_bytes=512MiB."),
]
FrontendSetting = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Set any configuration key, e.g. max_inflight_requests=64."),
]
EndpointFile = Annotated[
    Path | None,
    typer.Option("--endpoint-file", metavar="PATH", help="Write HOST:PORT to this file once serving."),
]
LogLevel = Annotated[
    Literal["debug", "info", "warning", "error"],
    typer.Option("--log-level", case_sensitive=False, help="Least severity of what is logged."),
]


@app.callback(invoke_without_command=True)
def root(context: typer.Context) -> int:
    """Say what there is to say when no command is named."""
    if context.invoked_subcommand is None:
        print(context.get_help(), file=sys.stderr)
    return EXIT_FAILED


@app.command()
def demo(
    model: Annotated[
        str,
        typer.Option(
            metavar="TEXT",
            help="smollm2, tiny-gpt-oss, tiny-gemma3, tiny-deepseek-v3, tiny-qwen3-next, tiny-nemotron-h, "
            "tiny-falcon-h1, tiny-bamba, or a model folder or .gguf file.",
        ),
    ] = "smollm2",
    prompt: Annotated[
        str | None, typer.Option(metavar="TEXT", help="Text to answer; a question about the Moon when not given.")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(metavar="NUMBER", help="Tokens to generate at most.")] = 48,
    prefill: Annotated[int, typer.Option(metavar="NUMBER", help="Number of prefill workers.")] = 1,
    decode: Annotated[int, typer.Option(metavar="NUMBER", help="Number of decode workers.")] = 1,
    manager: Annotated[
        str, typer.Option(metavar="v1|v2", help="v2: pools shared by life cycles; v1: one pool per window.")
    ] = "v2",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> int:
    """Serve one prompt disaggregated on this machine and compare with a single process.

    Exit code 0: identical. 1: the tokens differ. 2: it could not run.
    """
    text = None if prompt is None else _text(prompt)
    _check_new_tokens(max_new_tokens)
    for flag, number in (("--prefill", prefill), ("--decode", decode)):
        _require(1 <= number <= MAX_WORKERS, flag, number, f"from 1 to {MAX_WORKERS}")
    _require(manager.upper() in MANAGERS, "--manager", manager, "v1 or v2")
    # The model libraries take seconds to import; only this command and `worker` need them.
    from kvferry.deploy.demo import PROMPT, DemoOptions, run_demo

    options = DemoOptions(
        model, PROMPT if text is None else text, max_new_tokens, prefill, decode, manager.upper(), as_json
    )
    with terminated_like_interrupted():
        return run_demo(options)


@app.command()
def worker(
    role: Annotated[str | None, typer.Option(metavar="ROLE", help="prefill, decode or both. Required.")] = None,
    config: Config = None,
    name: Annotated[str | None, typer.Option(metavar="TEXT", help="Name in the directory.")] = None,
    model: Annotated[str | None, typer.Option(metavar="TEXT", help="Model name, folder or .gguf file.")] = None,
    listen: Listen = None,
    directory: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="The frontend, which serves the directory. Required.")
    ] = None,
    settings: WorkerSetting = None,
    endpoint_file: EndpointFile = None,
    log_level: LogLevel = "info",
) -> int:
    """Run a prefill worker, a decode worker, or one that does both.

    What is required may come from the flag, from the environment (KVFERRY_WORKER__ROLE=prefill) or from the file.
    """
    flags = {"role": role, "name": name, "model": model, "listen": listen, "directory": directory}
    loaded = load(WorkerConfig, config, {**flags, **_pairs(settings)}, os.environ)
    if endpoint_file is not None:
        check_endpoint_file(endpoint_file)
    configure_logging(log_level)
    # The model libraries take seconds to import; wrong configuration is reported before that.
    from kvferry.deploy.worker import build_parts, run_worker

    # Before any signal handler is set: while the model loads there is nothing to wind up, so signals just end it.
    parts = build_parts(loaded)
    return serve(lambda stop: run_worker(loaded, parts, stop, endpoint_file))


@app.command()
def frontend(
    config: Config = None,
    listen: Listen = None,
    settings: FrontendSetting = None,
    endpoint_file: EndpointFile = None,
    log_level: LogLevel = "info",
) -> int:
    """Run the frontend, which embeds the directory."""
    loaded = load(FrontendConfig, config, {"listen": listen, **_pairs(settings)}, os.environ)
    if endpoint_file is not None:
        check_endpoint_file(endpoint_file)
    configure_logging(log_level)
    from kvferry.deploy.frontend import run_frontend

    return serve(lambda stop: run_frontend(loaded, stop, endpoint_file))


@app.command()
def generate(
    frontend: Annotated[str, typer.Option(metavar="HOST:PORT", help="The frontend.")],
    prompt: Annotated[str, typer.Option(metavar="TEXT", help="Text to answer.")],
    max_new_tokens: Annotated[int, typer.Option(metavar="NUMBER", help="Tokens to generate at most.")] = 64,
    temperature: Annotated[float, typer.Option(metavar="NUMBER", help="0 is greedy.")] = 0.0,
    seed: Annotated[int, typer.Option(metavar="NUMBER", help="Seed of the draw when temperature is above 0.")] = 0,
    chat: Annotated[bool, typer.Option(help="Wrap the prompt as a user turn of the model's chat template.")] = True,
    timeout: Annotated[float, typer.Option(metavar="SECONDS", help="Limit of the whole request.")] = 120.0,
    wait: Annotated[
        float, typer.Option(metavar="SECONDS", help="Wait this long for the frontend, and workers, to serve.")
    ] = 0.0,
    cache_salt: Annotated[
        str, typer.Option(metavar="TEXT", help="Share cached pages only with requests of the same salt.")
    ] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> int:
    """Send one prompt to a frontend and stream the answer."""
    text = _text(prompt)
    _check_new_tokens(max_new_tokens)
    _require(0 <= temperature <= MAX_TEMPERATURE, "--temperature", temperature, f"from 0 to {MAX_TEMPERATURE:g}")
    _require(0 <= seed <= MAX_SEED, "--seed", seed, f"from 0 to {MAX_SEED}")
    _check_seconds("--timeout", timeout)
    if wait != 0:
        _check_seconds("--wait", wait)
    sampling = SamplingParams(max_new_tokens=max_new_tokens, temperature=temperature, seed=seed)
    _require(len(cache_salt) <= MAX_SALT_CHARS, "--cache-salt", len(cache_salt), f"{MAX_SALT_CHARS} or less")
    call = GenerateCall(prompt=text, chat=chat, sampling=sampling, timeout_seconds=timeout, cache_salt=cache_salt)
    return asyncio.run(_generate(frontend, call, wait, as_json))


@app.command()
def status(
    worker: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="The worker; its log and its --endpoint-file say where it serves.")
    ],
    timeout: Annotated[float, typer.Option(metavar="SECONDS", help="Limit of the wait for the answer.")] = 5.0,
) -> int:
    """Print what a worker says of itself as one JSON object."""
    _check_seconds("--timeout", timeout)
    return asyncio.run(_status(worker, timeout))


async def _generate(endpoint: str, call: GenerateCall, wait_seconds: float, as_json: bool) -> int:
    text = ""
    async with InferenceClient(endpoint) as client:
        if wait_seconds:
            await client.wait_serving(wait_seconds)
        async with aclosing(client.generate(call)) as events:
            async for event in events:
                if isinstance(event, TokenChunk):
                    text += event.text
                    if not as_json:
                        say(_shown(event.text), end="")
                elif as_json:
                    say(json.dumps({"text": text, **_plain(event)}))
    if not as_json:
        say("")
    return EXIT_OK


def _shown(text: str) -> str:
    """Generated text for standard output; a terminal would obey what is not printable, a file keeps it."""
    return printable(text) if sys.stdout.isatty() else text


async def _status(endpoint: str, timeout_seconds: float) -> int:
    async with InferenceClient(endpoint) as client:
        say(json.dumps(_plain(await client.get_status(timeout_seconds))))
    return EXIT_OK


def _plain(record: Any) -> dict[str, Any]:
    """A dataclass as JSON values; enums become their values."""
    return {key: json.loads(json.dumps(value, default=_json_value)) for key, value in asdict(record).items()}


def _json_value(value: Any) -> Any:
    return value.value


def _pairs(settings: list[str] | None) -> dict[str, str]:
    """Dotted keys and values of `--set`. Raises ConfigError for one without "="."""
    pairs = {}
    for setting in settings or []:
        key, equals, value = setting.partition("=")
        if not equals or not key:
            raise ConfigError(f"--set {setting}: write KEY=VALUE, for example pools.quota_bytes=512MiB")
        pairs[key] = value
    return pairs


def _text(prompt: str) -> str:
    """The prompt, when it is text. Raises ConfigError for nothing, and for bytes that are no UTF-8."""
    if not prompt:
        raise ConfigError("the prompt is empty: give --prompt some text")
    try:
        prompt.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(f"the prompt is not valid UTF-8, from character {error.start} on: fix --prompt") from None
    return prompt


def _require(holds: bool, flag: str, value: float | str, rule: str) -> None:
    if not holds:
        raise ConfigError(f"{flag} is {format(value, 'g') if isinstance(value, float) else value}: it must be {rule}")


def _check_new_tokens(value: int) -> None:
    _require(1 <= value <= MAX_TOKENS, "--max-new-tokens", value, f"from 1 to {MAX_TOKENS}")


def _check_seconds(flag: str, value: float) -> None:
    holds = math.isfinite(value) and 0 < value <= MAX_DURATION_SECONDS
    _require(holds, flag, value, f"a number of seconds above 0, at most {MAX_DURATION_SECONDS:.0f}")


def main() -> NoReturn:
    """Run a command and end the process with its exit code; errors are one line on stderr."""
    code = EXIT_FAILED
    try:
        never_fail_to_encode()
        code = exit_code(_run)
    finally:
        leave(code)


def _run() -> Any:
    die_with_parent()
    return app(standalone_mode=False)


def exit_code(command: Callable[[], Any]) -> int:
    """Run a command and say how it went: on stderr, when not well, and as an exit code."""
    try:
        result = command()
    except KVError as error:
        return _complain(str(error))
    except TyperException as error:
        return _complain(error.format_message().replace("Value error, ", "") + _given(error))
    except asyncio.CancelledError:
        return _complain("the call was cancelled from inside before it ended")
    except (NobodyReads, BrokenPipeError, SystemExit):  # the last is typer's answer to a closed pipe
        return EXIT_NOBODY_READS
    except OSError as error:
        return _complain(f"the system refused: {error}")
    except Exit as error:
        result = error.exit_code
    except Terminated as error:
        return _tell(str(error), 128 + error.number)
    except (KeyboardInterrupt, Abort):
        result = EXIT_INTERRUPTED
    except Exception:  # noqa: BLE001 - a bug: the traceback is shown, and the code is not mistaken for a verdict
        return _tell(traceback.format_exc(), EXIT_FAILED)
    if result == EXIT_INTERRUPTED:
        return _tell("interrupted", EXIT_INTERRUPTED)
    return result if isinstance(result, int) else EXIT_OK


def _given(error: TyperException) -> str:
    """The value that was refused, where typer's message leaves it out."""
    cause = error.__cause__
    given = repr(cause.errors()[0]["input"]) if isinstance(cause, ValidationError) else ""
    return f" (given: {given})" if given and given not in error.format_message() else ""


def _complain(message: str) -> int:
    return _tell(f"error: {' '.join(message.split())}", EXIT_FAILED)


def _tell(message: str, code: int) -> int:
    """Write to standard error, if anything can be written there, and return the exit code."""
    with suppress(OSError, ValueError):
        print(f"kvferry: {message}", file=sys.stderr)
    return code
