import importlib.util
import json
from pathlib import Path

import pytest

from benchmarks.cache import main

VLLM = importlib.util.find_spec("vllm") is not None


def test_cache_benchmark_runs_quickly_and_writes_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "cache.json"

    assert main(["--quick", "--only", "growth", "bookkeeping", "--json", str(path)]) == 0
    found = json.loads(path.read_text())
    assert found["quick"]
    assert found["machine"]["versions"]["torch"]
    assert len(found["growth"]) == 8
    assert len(found["bookkeeping"]) == 4
    assert ("vLLM is left out" in capsys.readouterr().out) != VLLM


def test_cache_benchmark_compares_with_vllm_where_installed(tmp_path: Path) -> None:
    path = tmp_path / "cache.json"
    main(["--quick", "--only", "matching", "--json", str(path)])

    expected = {"kvferry", "kvferry, from lists"} | ({"vllm"} if VLLM else set())
    found = json.loads(path.read_text())["matching"]
    assert all(set(entry["sides"]) == expected for entry in found)
    assert all((entry["ratio"] is not None) == VLLM for entry in found)
