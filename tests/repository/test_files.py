import re
import tomllib
from pathlib import Path

import pytest

import kvferry
from tests.repository.sources import ROOT, own_files

LOCK_FILES = {"Pipfile.lock", "pdm.lock", "poetry.lock", "pylock.toml", "uv.lock"}
# Where packages come from is each machine's own setting.
PACKAGE_SOURCE = re.compile(r"https?://|file://|git\+|--(extra-)?index-url|--find-links|--trusted-host")
HOME_FOLDER = re.compile(r"(?<![\w.])/(?:root|home/\w+|Users/\w+)/")
DECISION = re.compile(r"(\d{4})-[a-z0-9]+(-[a-z0-9]+)*\.md")


def _text(path: Path) -> str:
    return path.read_bytes().decode(errors="replace")


def test_no_lock_file_is_kept() -> None:
    assert not [path.name for path in own_files() if path.name in LOCK_FILES]


@pytest.mark.parametrize("name", ["constraints.txt", "pyproject.toml", "Makefile", ".ci/run"])
def test_build_files_name_no_package_index(name: str) -> None:
    assert not PACKAGE_SOURCE.findall((ROOT / name).read_text())


def test_no_file_names_a_home_folder() -> None:
    naming = [path for path in own_files() if path != Path(__file__) and HOME_FOLDER.search(_text(path))]

    assert not [str(path.relative_to(ROOT)) for path in naming]


def test_constraints_are_names_and_exact_versions() -> None:
    pins = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]

    assert pins
    assert not [pin for pin in pins if not re.fullmatch(r"[A-Za-z0-9._-]+==[0-9A-Za-z.]+", pin)]


def test_constraints_pin_every_requirement() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    required = [*project["dependencies"], *extras["hf"], *extras["dev"]]
    pinned = {_normal(line.split("==")[0]) for line in (ROOT / "constraints.txt").read_text().splitlines()}

    assert not [name for name in required if _normal(re.split(r"[<>=!~ ]", name)[0]) not in pinned]


def test_decisions_are_numbered_uniquely() -> None:
    names = sorted(path.name for path in (ROOT / "docs/decisions").iterdir())
    numbers = [match[1] for name in names if (match := DECISION.fullmatch(name))]

    assert len(numbers) == len(names), f"not all of these are NNNN-words.md: {names}"
    assert numbers == [f"{number:04}" for number in range(1, len(names) + 1)]


def test_changelog_has_the_version() -> None:
    headings = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)

    assert kvferry.__version__ in headings


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
