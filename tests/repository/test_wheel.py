import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from configparser import ConfigParser
from pathlib import Path

import pytest

import kvferry
from tests.repository.sources import PACKAGE_FOLDERS, ROOT, own_files

# Everything a build reads. It runs on a copy, since it writes beside its sources and reuses what an earlier one left.
BUILT_FROM = ("src", "cache", "transfer", "deploy", "proto", "pyproject.toml", "README.md", "LICENSE")
LINKED_FOLDERS = {
    "cache": "kvferry/cache",
    "transfer": "kvferry/transfer",
    "deploy": "kvferry/deploy",
    "proto/kvferry/v1": "kvferry/v1",
}
SHIPPED_FOLDERS = {"src/kvferry": "kvferry", **LINKED_FOLDERS}
SHIPPED_SUFFIXES = (".py", ".pyi", ".proto")

pytestmark = pytest.mark.xdist_group("wheel")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[zipfile.ZipFile]:
    """The wheel of this checkout, built with what is installed."""
    tree = tmp_path_factory.mktemp("tree")
    _copy_sources(tree)
    result = subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tree / "dist"), str(tree)],
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    (path,) = (tree / "dist").glob("*.whl")
    with zipfile.ZipFile(path) as opened:
        yield opened


def _copy_sources(tree: Path) -> None:
    for path in own_files():
        relative = path.relative_to(ROOT)
        if relative.parts[0] in BUILT_FROM:
            (tree / relative).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, tree / relative)
    for link in (ROOT / "src/kvferry").iterdir():
        if link.is_symlink():
            (tree / "src/kvferry" / link.name).symlink_to(link.readlink())


def _shipped() -> set[str]:
    """Where each source file of the packages is inside the wheel."""
    found = {"kvferry/py.typed"}
    for path in own_files():
        for folder, package in SHIPPED_FOLDERS.items():
            if path.is_relative_to(ROOT / folder) and path.suffix in SHIPPED_SUFFIXES:
                found.add(f"{package}/{path.relative_to(ROOT / folder)}")
    return found


def _text(wheel: zipfile.ZipFile, name: str) -> str:
    (found,) = (entry for entry in wheel.namelist() if entry.endswith(f".dist-info/{name}"))
    return wheel.read(found).decode()


def test_wheel_holds_every_source_file_and_no_other(wheel: zipfile.ZipFile) -> None:
    held = {name for name in wheel.namelist() if ".dist-info/" not in name}

    assert held == _shipped()


def test_wheel_has_the_generated_modules(wheel: zipfile.ZipFile) -> None:
    protos = [path.stem for path in (ROOT / "proto/kvferry/v1").glob("*.proto")]

    assert protos
    assert {f"kvferry/v1/{name}_pb2.py" for name in protos} <= set(wheel.namelist())


def test_wheel_has_the_entry_points(wheel: zipfile.ZipFile) -> None:
    entries = ConfigParser()
    entries.read_string(_text(wheel, "entry_points.txt"))

    assert dict(entries["console_scripts"]) == {"kvferry": "kvferry.deploy.cli:main"}
    assert dict(entries["kvferry.transports"]) == {
        "loopback": "kvferry.transfer.transport.loopback:LoopbackTransport",
        "nixl": "kvferry.transfer.transport.nixl:NixlTransport",
    }


def test_wheel_names_version_license_and_python(wheel: zipfile.ZipFile) -> None:
    lines = _text(wheel, "METADATA").splitlines()

    assert f"Version: {kvferry.__version__}" in lines
    assert "License-Expression: Apache-2.0" in lines
    assert "Requires-Python: >=3.11" in lines
    assert "Apache License" in _text(wheel, "licenses/LICENSE")


@pytest.mark.parametrize("folder", LINKED_FOLDERS)
def test_package_folder_is_reached_by_its_link(folder: str) -> None:
    link = ROOT / "src" / LINKED_FOLDERS[folder]

    assert link.is_symlink()
    assert not link.readlink().is_absolute()
    assert link.resolve() == (ROOT / folder).resolve()


def test_every_folder_with_modules_is_a_package() -> None:
    folders = {
        path.parent
        for path in own_files()
        if path.suffix == ".py" and path.relative_to(ROOT).parts[0] in PACKAGE_FOLDERS
    }

    assert folders
    assert not [str(folder) for folder in sorted(folders) if not (folder / "__init__.py").is_file()]
