"""What the benchmarks found, as tables for people and as JSON for programs."""

import json
import os
import platform
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.stopwatch import Timing

OURS, PEER = "kvferry", "vllm"


@dataclass(frozen=True)
class Comparison:
    """One operation under one condition, by side."""

    operation: str
    condition: str
    timings: Mapping[str, Timing]

    @property
    def ratio(self) -> float | None:
        """How many times faster kvferry is than vLLM, by medians; None when one of them was not measured."""
        if OURS not in self.timings or PEER not in self.timings:
            return None
        return self.timings[PEER].median_s / self.timings[OURS].median_s

    def as_json(self) -> dict[str, Any]:
        return {
            "operation": self.operation,
            "condition": self.condition,
            "ratio": self.ratio,
            "sides": {name: _timing_json(timing) for name, timing in self.timings.items()},
        }


@dataclass(frozen=True)
class Bookkeeping:
    """Memory of the books of a full pool, by side."""

    condition: str
    bytes_per_page: Mapping[str, float]
    cached_pages: Mapping[str, int]

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Scaling:
    """kvferry's cost for a prompt of one length."""

    condition: str
    num_tokens: int
    serve: Timing
    match: Timing

    def as_json(self) -> dict[str, Any]:
        return {
            "condition": self.condition,
            "num_tokens": self.num_tokens,
            "serve": _timing_json(self.serve),
            "match": _timing_json(self.match),
        }


def _timing_json(timing: Timing) -> dict[str, Any]:
    return {"median_s": timing.median_s, "best_s": timing.best_s, "worst_s": timing.worst_s}


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown with aligned columns; all but the first two columns are numbers."""
    lines = [list(header), *(list(row) for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    texts = [_table_line(line, widths) for line in lines]
    rule = "|".join("-" * (width + 2) for width in widths)
    return "\n".join([texts[0], f"|{rule}|", *texts[1:]])


def _table_line(cells: Sequence[str], widths: Sequence[int]) -> str:
    aligned = [
        cell.ljust(width) if i < 2 else cell.rjust(width)
        for i, (cell, width) in enumerate(zip(cells, widths, strict=True))
    ]
    return "| " + " | ".join(aligned) + " |"


def comparison_table(comparisons: Sequence[Comparison]) -> str:
    """Medians and worst rounds of every side, and vLLM's median over kvferry's."""
    names = list(dict.fromkeys(name for entry in comparisons for name in entry.timings))
    header = ["operation", "condition"]
    for name in names:
        header += [name, "worst"]
    compared = any(entry.ratio is not None for entry in comparisons)
    rows = []
    for entry in comparisons:
        row = [entry.operation, entry.condition]
        for name in names:
            timing = entry.timings.get(name)
            row += ["", ""] if timing is None else [duration(timing.median_s), duration(timing.worst_s)]
        rows.append(row + ([f"{entry.ratio:.2f}" if entry.ratio else ""] if compared else []))
    return table(header + (["vllm / kvferry"] if compared else []), rows)


def bookkeeping_table(entries: Sequence[Bookkeeping]) -> str:
    """Bytes per cached page of every side."""
    names = list(dict.fromkeys(name for entry in entries for name in entry.bytes_per_page))
    header = ["memory", "condition", *(text for name in names for text in (f"{name}, bytes per page", "cached pages"))]
    rows = []
    for entry in entries:
        figures = [(f"{entry.bytes_per_page[name]:.0f}", str(entry.cached_pages[name])) for name in names]
        rows.append(["books of a full pool", entry.condition, *(text for pair in figures for text in pair)])
    return table(header, rows)


def scaling_table(entries: Sequence[Scaling]) -> str:
    """Cost by length of the prompt, whole and per 1,000 tokens."""
    header = ["tokens", "condition", "admit, commit, free", "per 1,000", "match 90 %", "per 1,000"]
    rows = []
    for entry in entries:
        cells = [f"{entry.num_tokens:,}", entry.condition]
        for timing in (entry.serve, entry.match):
            cells += [duration(timing.median_s), duration(timing.median_s * 1000 / entry.num_tokens)]
        rows.append(cells)
    return table(header, rows)


def duration(seconds: float) -> str:
    """A duration in the unit that suits it."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.2f} {unit}"
    return f"{seconds * 1e6:.1f} us"


def machine(versions: Mapping[str, str]) -> dict[str, Any]:
    """Where the figures come from."""
    return {
        "cores": os.cpu_count(),
        "machine": platform.machine(),
        "python": platform.python_version(),
        "versions": dict(versions),
    }


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a report; its folder is made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=2) + "\n")
