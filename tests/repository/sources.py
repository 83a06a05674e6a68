"""The project's own files as these tests read them."""

import ast
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PACKAGE_FOLDERS = {"cache": "kvferry.cache", "transfer": "kvferry.transfer", "deploy": "kvferry.deploy"}
GENERATED = "kvferry.v1"


class Import(NamedTuple):
    """One imported module, where, and the function around it ("" at the top of the file)."""

    module: str
    line: int
    function: str


class Source(NamedTuple):
    """One module of the project."""

    path: Path
    module: str

    @property
    def place(self) -> str:
        return str(self.path.relative_to(ROOT))


@cache
def sources() -> tuple[Source, ...]:
    """Every module written by hand, by path."""
    return tuple(
        Source(path, _module(path, package))
        for folder, package in PACKAGE_FOLDERS.items()
        for path in sorted((ROOT / folder).rglob("*.py"))
    )


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


def imports(source: Source) -> tuple[Import, ...]:
    """Everything a module imports, under whatever condition."""
    return tuple(walk(parsed(source.path)))


def own_files() -> tuple[Path, ...]:
    """Every file that is, or is about to be, under version control."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
        text=True,
        timeout=30,
    )
    return tuple(path for name in listed.stdout.split("\0") if name and (path := ROOT / name).is_file())


def inside(module: str, packages: tuple[str, ...]) -> bool:
    """Whether the module is one of these packages or modules, or lies inside one."""
    return any(module == package or module.startswith(package + ".") for package in packages)


def _module(path: Path, package: str) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts[1:]
    return ".".join((package, *(part for part in parts if part != "__init__")))


def walk(node: ast.AST, function: str = "") -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from walk(child, child.name)
        elif isinstance(child, ast.Import):
            yield from (Import(alias.name, child.lineno, function) for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            yield from (Import(_imported(child, alias), child.lineno, function) for alias in child.names)
        else:
            yield from walk(child, function)


def _imported(node: ast.ImportFrom, alias: ast.alias) -> str:
    """`from package import name` imports package.name where that is a module of ours, and else package."""
    package = node.module or ""
    return name if (name := f"{package}.{alias.name}") in _own_modules() else package


@cache
def _own_modules() -> frozenset[str]:
    generated = (f"{GENERATED}.{path.stem}" for path in (ROOT / "proto/kvferry/v1").glob("*.py"))
    return frozenset([*(source.module for source in sources()), *generated])
