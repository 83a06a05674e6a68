"""Small pools, real models and plain tables, from which scripts/pool_pages.py makes its traces."""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from kvferry.cache.errors import KVError
from kvferry.cache.ids import LayerId
from kvferry.cache.layout import CacheLayout, build_layout
from kvferry.cache.manager import KVCacheManager
from kvferry.cache.sequence import SequenceCache
from kvferry.cache.spec import BufferSpec, LayerSpec, ModelSpec, StateSpec, from_transformers_config

ROOT = Path(__file__).resolve().parents[1]
MODELS = ("gpt-oss-120b", "gemma-3-27b", "llama-3-70b")
KEPT = (BufferSpec("key", 1, 4), BufferSpec("value", 1, 4))

Rows = Iterator[str]


def layers(*windows: int | None, sink_tokens: int = 0) -> tuple[LayerSpec, ...]:
    return tuple(
        LayerSpec(LayerId(index), window, KEPT, sink_tokens=sink_tokens if window else 0)
        for index, window in enumerate(windows)
    )


def small_layout(*windows: int | None, tokens_per_block: int = 4) -> CacheLayout:
    return build_layout(ModelSpec("small", "float32", layers(*windows)), tokens_per_block=tokens_per_block)


def hybrid_layout() -> CacheLayout:
    """One layer of full attention and one that keeps a state, blocks of 4 tokens."""
    state = LayerSpec(LayerId(1), None, states=(StateSpec("state", (4, 4)),))
    return build_layout(ModelSpec("hybrid", "float32", (*layers(None), state)), tokens_per_block=4)


def real_model(name: str) -> ModelSpec:
    config = json.loads((ROOT / "benchmarks" / "models" / f"{name}.json").read_text())
    return from_transformers_config(config, name=name, dtype="bfloat16")


def fenced(rows: Iterator[str]) -> Rows:
    yield from ("```text", *(row.rstrip() for row in rows), "```", "")


def table(header: str, rows: Iterator[Sequence[object]]) -> Rows:
    names = header.split(" | ")
    yield "| " + " | ".join(names) + " |"
    yield "|" + "---|" * len(names)
    yield from (
        "| " + " | ".join(f"{cell:,}" if isinstance(cell, int) else str(cell) for cell in row) + " |" for row in rows
    )
    yield ""


def cells(slots: Iterable[int]) -> str:
    """A row of a block table; a dot where there is no page."""
    return " ".join(f"{slot:2}" if slot >= 0 else " ." for slot in slots)


def columns(widths: Sequence[int], parts: Sequence[object]) -> str:
    return "  ".join(f"{part!s:<{width}}" for part, width in zip(parts, widths, strict=False))


def prompt(num_tokens: int, first: int = 100) -> list[int]:
    return list(range(first, first + num_tokens))


def run(
    manager: KVCacheManager, name: str, tokens: Sequence[int], *, chunk: int = 4, priority: int = 35
) -> SequenceCache:
    """A sequence with these tokens computed and committed in chunks."""
    sequence = manager.create_sequence(name, token_ids=tokens, priority=priority)
    sequence.resume()
    while sequence.committed < len(tokens):
        end = min(sequence.committed + chunk, len(tokens))
        sequence.resize(capacity=max(end, sequence.capacity))
        sequence.commit(tokens[sequence.committed : end], snapshot=True)
    return sequence


def refusal(act: Callable[[], object]) -> str:
    """The message of the error that an action raises."""
    try:
        act()
    except KVError as error:
        return f"{type(error).__name__}: {error}"
    raise SystemExit("docs/pools.md shows an error that is not raised any more")


def wrapped(text: str, width: int = 100) -> Rows:
    """A long message in lines, indented."""
    line = " "
    for word in text.split():
        if len(line) + len(word) >= width:
            yield line
            line = " "
        line += f" {word}"
    yield line
