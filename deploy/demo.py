"""`kvferry demo`: a real model served disaggregated on this machine, compared with the same model in one process."""

import asyncio
import json
import os
import sys
import time
from collections.abc import Callable
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvferry.cache.errors import ConfigError, DeadlineExceeded, InvariantError
from kvferry.deploy.cluster import Cluster, running_cluster, start_cluster
from kvferry.deploy.process import EXIT_DIFFERENT, EXIT_OK, printable, say
from kvferry.transfer.control.client import InferenceClient
from kvferry.transfer.engines.loaded_model import LoadedModel
from kvferry.transfer.engines.models import load_model
from kvferry.transfer.engines.oracle import generate_in_one_process
from kvferry.transfer.inference import (
    GenerateCall,
    GenerateSummary,
    PoolGroupStatus,
    SamplingParams,
    TokenChunk,
    WorkerStatus,
)

START_SECONDS = 180.0
REQUEST_SECONDS = 300.0
DRAIN_SECONDS = 10.0
PREFILL_CHUNK_TOKENS = 256
TABLE_WIDTH = 100
PROMPT_WIDTH = 190

PROMPT = (
    "The Moon is about 384,400 kilometres from Earth and takes 27.3 days to orbit it. Its diameter is 3,474 kilometres "
    "and its gravity is one sixth of that on Earth. It has no air, so there is no wind and no sound. The first people "
    "landed there on 20 July 1969. Its far side was first photographed in 1959 by a Soviet probe. The tides of the "
    "oceans on Earth are mostly caused by the gravity of the Moon. The Moon always shows the same face to Earth "
    "because it turns once per orbit. Its temperatures swing from 127 degrees Celsius in sunlight to minus 173 degrees "
    "in the dark.\n\nWhat causes the tides on Earth, and why does the Moon always show the same face?"
)


@dataclass(frozen=True)
class DemoOptions:
    """What the command line asked for; numbers are at least 1, the prompt is not empty."""

    model: str
    prompt: str
    max_new_tokens: int
    num_prefill: int
    num_decode: int
    manager: str
    as_json: bool


@dataclass(frozen=True)
class Served:
    """What came out of the cluster.

    Attributes:
        first_token_seconds: until the token arrived that the prefill worker sampled.
        ttft_seconds: until the first token arrived that the decode worker computed; of the only token, if there is one.
    """

    tokens: list[int]
    text: str
    summary: GenerateSummary
    ttft_seconds: float
    first_token_seconds: float
    decode_status: WorkerStatus


def run_demo(options: DemoOptions) -> int:
    """Serve, compare, report. Returns the exit code.

    Raises: KVError when it could not run.
    """
    report = _quiet if options.as_json else _progress
    threads = max(1, (os.cpu_count() or 2) // 2)
    # Loaded before the workers start: a first use converts the weights once, for everyone.
    torch.set_num_threads(threads)
    report(f"loading {options.model}")
    model = load_model(options.model, report=report)
    check_length(model, options.prompt, options.max_new_tokens)
    with running_cluster() as cluster:
        # Before asyncio: children live as long as the thread that starts them, and Ctrl-C ends this wait at once.
        endpoint = _start(cluster, options, threads, report)
        served = asyncio.run(_serve(cluster, endpoint, options))
    report("running the same model in one process")
    expected = generate_in_one_process(
        model, served.summary.prompt_token_ids, _sampling(options), PREFILL_CHUNK_TOKENS
    ).token_ids
    identical = served.tokens == list(expected)
    equal = sum(ours == theirs for ours, theirs in zip(served.tokens, expected, strict=False))
    if options.as_json:
        say(json.dumps(_as_json(options, served, identical)))
    else:
        say(_table(_rows(options, served)), end="")
        say(f"identical to a single process: {'yes' if identical else 'NO'} ({equal}/{len(expected)} tokens)")
    return EXIT_OK if identical else EXIT_DIFFERENT


def check_length(model: LoadedModel, prompt: str, max_new_tokens: int) -> None:
    """Raise ConfigError when the model cannot hold the prompt and its answer."""
    tokens, limit = len(model.tokenizer.encode(prompt, chat=True)), model.max_seq_len_tokens
    if tokens + max_new_tokens > limit:
        raise ConfigError(
            f"the prompt has {tokens} tokens and --max-new-tokens is {max_new_tokens}, but {model.name} holds at most "
            f"{limit} tokens of both together: shorten --prompt or lower --max-new-tokens"
        )


def _sampling(options: DemoOptions) -> SamplingParams:
    return SamplingParams(max_new_tokens=options.max_new_tokens)


def _start(cluster: Cluster, options: DemoOptions, threads: int, report: Callable[[str], None]) -> str:
    report(f"starting a frontend, {options.num_prefill} prefill and {options.num_decode} decode")
    worker = {
        "model": options.model,
        "num_threads": threads,
        "prefill_chunk_tokens": PREFILL_CHUNK_TOKENS,
        "pools": {"manager": options.manager},
    }
    return start_cluster(
        cluster,
        num_prefill=options.num_prefill,
        num_decode=options.num_decode,
        worker=worker,
        timeout_seconds=START_SECONDS,
    )


async def _serve(cluster: Cluster, endpoint: str, options: DemoOptions) -> Served:
    async with InferenceClient(endpoint) as client:
        await client.wait_serving(START_SECONDS)
        return await _generate(client, cluster, options)


async def _generate(client: InferenceClient, cluster: Cluster, options: DemoOptions) -> Served:
    call = GenerateCall(prompt=options.prompt, chat=True, sampling=_sampling(options), timeout_seconds=REQUEST_SECONDS)
    started = time.monotonic()
    arrivals: list[float] = []
    tokens: list[int] = []
    text, summary = "", None
    show = _quiet if options.as_json else _show
    show(f"prompt: {shortened(options.prompt)}\nanswer: ")
    async with aclosing(client.generate(call)) as events:
        async for event in events:
            if isinstance(event, TokenChunk):
                arrivals.append(time.monotonic() - started)
                tokens += event.token_ids
                text += event.text
                show(event.text)
            else:
                summary = event
    if summary is None:
        raise InvariantError("the stream ended without a summary")
    show(f"\n(stopped at --max-new-tokens {options.max_new_tokens})\n" if summary.finish_reason == "length" else "\n")
    status = await _drained_status(cluster, summary.receiver.name)
    return Served(tokens, text, summary, arrivals[min(1, len(arrivals) - 1)], arrivals[0], status)


async def _drained_status(cluster: Cluster, name: str) -> WorkerStatus:
    """The decode worker's status once nobody uses any page of any worker."""
    found: dict[str, WorkerStatus] = {}
    deadline = time.monotonic() + DRAIN_SECONDS
    for child in cluster.children[1:]:
        assert child.endpoint is not None
        async with InferenceClient(child.endpoint) as client:
            found[child.name] = await _wait_free(client, deadline)
    return found[name]


async def _wait_free(client: InferenceClient, deadline: float) -> WorkerStatus:
    while True:
        status = await client.get_status()
        if status.integrity != "ok":
            raise InvariantError(f"{status.worker}: {status.integrity}")
        if all(group.free + group.cached == group.num_slots for group in status.pool_groups):
            return status
        if time.monotonic() >= deadline:
            raise DeadlineExceeded(f"pages are still in use: {status.pool_groups}", peer=str(status.worker))
        await asyncio.sleep(0.05)


# ---- report


def shortened(prompt: str) -> str:
    """The prompt on about two lines of a terminal."""
    text = " ".join(prompt.split())
    return text if len(text) <= PROMPT_WIDTH else text[:PROMPT_WIDTH].rstrip() + " [...]"


def _parts(served: Served) -> dict[str, float]:
    """Seconds of the time to the first token that decode computed, to the microsecond; they add up to the total."""
    timings, total = served.summary.timings, _rounded(served.ttft_seconds)
    known = {
        "queue": _rounded(timings.queue_seconds),
        "prefill": _rounded(timings.prefill_seconds),
        "transfer": _rounded(timings.transfer_seconds),
        "first_decode_step": _rounded(timings.first_decode_step_seconds),
    }
    return {"total": total, **known, "other": _rounded(max(0.0, total - sum(known.values())))}


def _rounded(seconds: float) -> float:
    return round(seconds, 6)


def _pool_groups(status: WorkerStatus) -> list[dict[str, Any]]:
    return [
        {"life_cycles": list(group.life_cycles), "slot_bytes": group.slot_bytes, "num_slots": group.num_slots}
        for group in status.pool_groups
    ]


def _as_json(options: DemoOptions, served: Served, identical: bool) -> dict[str, Any]:
    summary, wire, status = served.summary, served.summary.wire, served.decode_status
    return {
        "identical": identical,
        "model": options.model,
        "prompt_tokens": summary.usage.prompt_tokens,
        "new_tokens": summary.new_tokens,
        "text": served.text,
        "manager": status.manager,
        "transport": status.transport,
        "runtime": status.runtime,
        "lane": wire.lane,
        "blocks": summary.num_blocks,
        "pages": wire.num_pages,
        "bytes": wire.num_bytes,
        "descriptors": wire.num_descriptors,
        "transfer_seconds": _rounded(wire.seconds),
        "ttft_seconds": _parts(served),
        "first_token_seconds": _rounded(served.first_token_seconds),
        "pool_groups": _pool_groups(status),
        "prefill_worker": summary.sender.name,
        "decode_worker": summary.receiver.name,
    }


def _rows(options: DemoOptions, served: Served) -> list[tuple[str, str]]:
    """The table of the report: what, and its value."""
    summary, wire, status = served.summary, served.summary.wire, served.decode_status
    parts = _parts(served)
    rate = wire.num_bytes / wire.seconds / 1e9 if wire.seconds else 0.0
    split = " + ".join(f"{name.replace('_', ' ')} {parts[name]:.3f}" for name in list(parts)[1:])
    return [
        ("model", options.model),
        ("workers", f"{summary.sender.name} -> {summary.receiver.name}"),
        ("manager, transport, runtime", f"{status.manager}, {status.transport}, {status.runtime}"),
        ("pool groups", "\n".join(described(group) for group in status.pool_groups)),
        ("prompt tokens", str(summary.usage.prompt_tokens)),
        ("blocks / pages", f"{summary.num_blocks} / {wire.num_pages}"),
        ("bytes moved", f"{wire.num_bytes:,}"),
        ("descriptors", str(wire.num_descriptors)),
        ("lane", wire.lane),
        ("transfer", f"{wire.seconds:.6f} s, {rate:.2f} GB/s"),
        ("token sampled by prefill", f"after {served.first_token_seconds:.3f} s"),
        ("time to first token", f"{parts['total']:.3f} s, computed by decode\n= {split}"),
    ]


def described(group: PoolGroupStatus) -> str:
    """A pool group as the table has it, such as "full: 182 slots of 1.41 MiB"."""
    return f"{' and '.join(group.life_cycles)}: {group.num_slots} slots of {_size(group.slot_bytes)}"


def _size(num_bytes: int) -> str:
    unit, divisor = ("MiB", 1 << 20) if num_bytes >= 1 << 20 else ("KiB", 1 << 10)
    return f"{num_bytes / divisor:.2f}".rstrip("0").rstrip(".") + f" {unit}"


def _table(rows: list[tuple[str, str]]) -> str:
    """As wide as the terminal, at most TABLE_WIDTH columns."""
    table = Table(show_header=False)
    for name, value in rows:
        table.add_row(name, Text(value))
    console = Console()
    console = Console(width=min(TABLE_WIDTH, console.width) if console.is_terminal else TABLE_WIDTH)
    with console.capture() as captured:
        console.print(table)
    return captured.get()


def _show(text: str) -> None:
    say(printable(text), end="")


def _progress(text: str) -> None:
    with suppress(OSError):
        print(text, file=sys.stderr, flush=True)


def _quiet(text: str) -> None:
    """JSON output stays one object."""
