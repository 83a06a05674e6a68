import json
from pathlib import Path

import pytest

from benchmarks.report import (
    Bookkeeping,
    Comparison,
    Scaling,
    bookkeeping_table,
    comparison_table,
    duration,
    scaling_table,
    write_json,
)
from benchmarks.stopwatch import Timing

OURS, PEER = Timing((0.001, 0.002, 0.003)), Timing((0.006, 0.005, 0.009))
BOTH = Comparison("admit", "full, block 16", {"kvferry": OURS, "vllm": PEER})
ALONE = Comparison("admit", "full, block 16", {"kvferry": OURS})


def cells(table: str) -> list[list[str]]:
    lines = [line for line in table.splitlines() if "---" not in line]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_comparison_table_shows_medians_worst_rounds_and_their_ratio() -> None:
    header, row = cells(comparison_table([BOTH]))

    assert header == ["operation", "condition", "kvferry", "worst", "vllm", "worst", "vllm / kvferry"]
    assert row == ["admit", "full, block 16", "2.00 ms", "3.00 ms", "6.00 ms", "9.00 ms", "3.00"]


def test_comparison_table_without_vllm_has_no_column_for_it() -> None:
    header, row = cells(comparison_table([ALONE]))

    assert header == ["operation", "condition", "kvferry", "worst"]
    assert row == ["admit", "full, block 16", "2.00 ms", "3.00 ms"]


def test_comparison_json_has_the_ratio_and_all_sides() -> None:
    assert BOTH.as_json()["ratio"] == 3.0
    assert ALONE.as_json()["ratio"] is None
    assert set(BOTH.as_json()["sides"]) == {"kvferry", "vllm"}


def test_bookkeeping_table_has_bytes_and_pages_per_side() -> None:
    entry = Bookkeeping("full, block 16", {"kvferry": 100.4, "vllm": 289.0}, {"kvferry": 7, "vllm": 8})

    assert cells(bookkeeping_table([entry]))[1][2:] == ["100", "7", "289", "8"]


def test_scaling_table_shows_the_cost_per_1000_tokens() -> None:
    entry = Scaling("full, block 16", 10_000, OURS, PEER)

    assert cells(scaling_table([entry]))[1] == [
        "10,000",
        "full, block 16",
        "2.00 ms",
        "200.0 us",
        "6.00 ms",
        "600.0 us",
    ]


def test_every_line_of_a_table_is_as_wide() -> None:
    assert len({len(line) for line in comparison_table([BOTH, ALONE]).splitlines()}) == 1


@pytest.mark.parametrize(
    "seconds, text", [(2.5, "2.50 s"), (0.0123, "12.30 ms"), (0.000_45, "450.0 us"), (0.000_000_4, "0.4 us")]
)
def test_duration_picks_the_unit(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_write_json_makes_the_folder(tmp_path: Path) -> None:
    path = tmp_path / "deep/down.json"
    write_json(path, {"entries": [BOTH.as_json()]})

    assert json.loads(path.read_text())["entries"][0]["sides"]["vllm"]["worst_s"] == 0.009
