"""The generated parts of docs/: written from the code, stale when either changes."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.repository.sources import ROOT

READ_BY_PAGES = ("benchmarks", "cache", "deploy", "proto", "transfer")
EXAMPLE = ROOT / "docs" / "examples" / "embedding.py"


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=120)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of the repository whose pages may be spoiled; what they are made from is the repository's own."""
    for name in ("docs", "scripts"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in READ_BY_PAGES:
        (tmp_path / name).symlink_to(ROOT / name)
    result = run(str(tmp_path / "scripts" / "pages.py"))
    assert result.returncode == 0, result.stderr
    return tmp_path


def test_spoiled_page_is_stale_and_is_written_again(checkout: Path) -> None:
    page, script = checkout / "docs" / "pools.md", str(checkout / "scripts" / "pages.py")
    good = page.read_text()
    page.write_text(good.replace("1,179,648", "1,179,649"))

    assert run(script, "--check").stderr.strip() == "stale: docs/pools.md: run scripts/pages.py"
    assert run(script).returncode == 0
    assert page.read_text() == good


@pytest.mark.parametrize("change", [("<!-- stale: ", "<!-- stall: "), ("<!-- stale: what", "<!-- what")])
def test_page_without_one_of_its_parts_is_an_error(checkout: Path, change: tuple[str, str]) -> None:
    page = checkout / "docs" / "pools.md"
    page.write_text(page.read_text().replace(*change))

    result = run(str(checkout / "scripts" / "pages.py"), "--check")

    assert result.returncode == 1
    assert result.stderr.startswith("docs/pools.md has parts named")


def test_embedding_example_runs_and_prints_what_the_page_says() -> None:
    page = (ROOT / "docs" / "pools.md").read_text()
    shown = re.search(r"```python\n(.*?)```\n\nIt prints:\n\n```text\n(.*?)```", page, re.DOTALL)
    assert shown

    result = run(str(EXAMPLE))

    assert result.returncode == 0, result.stderr
    assert shown[1] == EXAMPLE.read_text()
    assert shown[2] == result.stdout


def test_paths_named_in_pages_exist() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    named = {
        path for page in pages for path in re.findall(r"`((?:cache|deploy|docs|transfer)/[\w/.]+\w)`", page.read_text())
    }
    decisions = {name for page in pages for name in re.findall(r"docs/decisions/(\d{4})", page.read_text())}

    assert len(named) > 10
    assert not [path for path in named if not (ROOT / path).exists()]
    assert not [number for number in decisions if not list((ROOT / "docs" / "decisions").glob(f"{number}-*.md"))]
