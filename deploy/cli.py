"""The command line: `kvferry demo | worker | frontend | generate | status`."""

import asyncio
import json
import os
import sys
import traceback
from collections.abc import Callable
from contextlib import aclosing
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
    EXIT_OK,
    check_endpoint_file,
    configure_logging,
    die_with_parent,
    leave,
    serve,
)
from kvferry.transfer.control.client import InferenceClient
from kvferry.transfer.inference import GenerateCall, SamplingParams, TokenChunk

app = typer.Typer(
    name="kvferry",
    help="Move the KV cache of a prompt from the worker that computed it to the worker that decodes it.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

Config = Annotated[Path | None, typer.Option("--config", help="YAML file with the configuration.")]
Listen = Annotated[str | None, typer.Option("--listen", help="HOST:PORT to serve on; port 0 takes a free one.")]
Setting = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Set any configuration key, e.g. pools.quota_bytes=512MiB."),
]
EndpointFile = Annotated[
    Path | None, typer.Option("--endpoint-file", help="Write HOST:PORT to this file once serving.")
]
LogLevel = Annotated[
    Literal["debug", "info", "warning", "error"],
    typer.Option("--log-level", case_sensitive=False, help="Least severity of what is logged."),
]


@app.command()
def demo(
    model: Annotated[
        str, typer.Option(help="smollm2, tiny-gpt-oss, tiny-gemma3, or a model folder or .gguf file.")
    ] = "smollm2",
    prompt: Annotated[
        str | None, typer.Option(help="Text to answer; a question about the Moon when not given.")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens to generate at most.")] = 48,
    prefill: Annotated[int, typer.Option(help="Number of prefill workers.")] = 1,
    decode: Annotated[int, typer.Option(help="Number of decode workers.")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> int:
    """Serve one prompt disaggregated on this machine and compare with a single process.

    Exit code 0: identical. 1: the tokens differ. 2: it could not run.
    """
    text = None if prompt is None else _text(prompt)
    # The model libraries take seconds to import; only this command and `worker` need them.
    from kvferry.deploy.demo import PROMPT, DemoOptions, run_demo

    options = DemoOptions(model, PROMPT if text is None else text, max_new_tokens, prefill, decode, as_json)
    return run_demo(options)


@app.command()
def worker(
    role: Annotated[str | None, typer.Option(help="prefill, decode or both.")] = None,
    config: Config = None,
    name: Annotated[str | None, typer.Option(help="Name in the directory.")] = None,
    model: Annotated[str | None, typer.Option(help="Model name, folder or .gguf file.")] = None,
    listen: Listen = None,
    directory: Annotated[str | None, typer.Option(help="HOST:PORT of the frontend's directory.")] = None,
    settings: Setting = None,
    endpoint_file: EndpointFile = None,
    log_level: LogLevel = "info",
) -> int:
    """Run a prefill worker, a decode worker, or one that does both."""
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
    settings: Setting = None,
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
    frontend: Annotated[str, typer.Option(help="HOST:PORT of the frontend.")],
    prompt: Annotated[str, typer.Option(help="Text to answer.")],
    max_new_tokens: Annotated[int, typer.Option(help="Tokens to generate at most.")] = 64,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Seed of the draw when temperature is above 0.")] = 0,
    chat: Annotated[bool, typer.Option(help="Wrap the prompt as a user turn of the model's chat template.")] = True,
    timeout: Annotated[float, typer.Option(help="Seconds the whole request may take.")] = 120.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> int:
    """Send one prompt to a frontend and stream the answer."""
    sampling = SamplingParams(max_new_tokens=max_new_tokens, temperature=temperature, seed=seed)
    call = GenerateCall(prompt=_text(prompt), chat=chat, sampling=sampling, timeout_seconds=timeout)
    return asyncio.run(_generate(frontend, call, as_json))


@app.command()
def status(
    worker: Annotated[str, typer.Option(help="HOST:PORT of the worker.")],
    timeout: Annotated[float, typer.Option(help="Seconds to wait for the answer.")] = 5.0,
) -> int:
    """Print what a worker says of itself as one JSON object."""
    return asyncio.run(_status(worker, timeout))


async def _generate(endpoint: str, call: GenerateCall, as_json: bool) -> int:
    text, tokens = "", 0
    async with InferenceClient(endpoint) as client, aclosing(client.generate(call)) as events:
        async for event in events:
            if isinstance(event, TokenChunk):
                text += event.text
                tokens += len(event.token_ids)
                if not as_json:
                    print(event.text, end="", flush=True)
            elif as_json:
                print(json.dumps({"text": text, **_plain(event)}))
    if not as_json:
        print()
    return EXIT_OK


async def _status(endpoint: str, timeout_seconds: float) -> int:
    async with InferenceClient(endpoint) as client:
        print(json.dumps(_plain(await client.get_status(timeout_seconds))))
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


def main() -> NoReturn:
    """Run a command and end the process with its exit code; errors are one line on stderr."""
    code = EXIT_FAILED
    try:
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
    except BrokenPipeError:
        return _complain("nobody reads the output any more")
    except Exit as error:
        result = error.exit_code
    except (KeyboardInterrupt, Abort):
        result = EXIT_INTERRUPTED
    except Exception:  # noqa: BLE001 - a bug: the traceback is shown, and the code is not mistaken for a verdict
        traceback.print_exc()
        return EXIT_FAILED
    if result == EXIT_INTERRUPTED:
        print("kvferry: interrupted", file=sys.stderr)
    return result if isinstance(result, int) else EXIT_OK


def _given(error: TyperException) -> str:
    """The value that was refused, where typer's message leaves it out."""
    cause = error.__cause__
    given = repr(cause.errors()[0]["input"]) if isinstance(cause, ValidationError) else ""
    return f" (given: {given})" if given and given not in error.format_message() else ""


def _complain(message: str) -> int:
    print(f"kvferry: error: {' '.join(message.split())}", file=sys.stderr)
    return EXIT_FAILED
