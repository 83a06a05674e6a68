#!/usr/bin/env python3
"""Write the list of modules in docs/structures.md from their docstrings; with --check, fail when it is stale."""

import ast
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "structures.md"
START, END = "<!-- modules: written by scripts/structures.py -->", "<!-- end of modules -->"
PACKAGES = (
    "cache",
    "transfer",
    "transfer/transport",
    "transfer/control",
    "transfer/control/convert",
    "transfer/engines",
    "deploy",
)


def sentence(path: Path) -> str:
    """First sentence of a module's docstring."""
    docstring = ast.get_docstring(ast.parse(path.read_text()))
    if not docstring:
        raise SystemExit(f"{path.relative_to(ROOT)} has no docstring: say in one sentence what it is")
    return " ".join(docstring.split("\n\n")[0].split())


def section(package: str) -> list[str]:
    """Heading and rows of one package."""
    modules = [path for path in sorted((ROOT / package).glob("*.py")) if path.name != "__init__.py"]
    return [f"\n### {package}/\n", *(f"* `{path.stem}`: {sentence(path)}" for path in modules)]


def protos() -> list[str]:
    """The services of the wire."""
    files = sorted((ROOT / "proto" / "kvferry" / "v1").glob("*.proto"))
    return ["\n### proto/kvferry/v1/\n", *(f"* `{path.name}`: {first_comment(path)}" for path in files)]


def first_comment(path: Path) -> str:
    """The sentence at the top of a .proto file."""
    return path.read_text().splitlines()[0].removeprefix("//").strip()


def page() -> str:
    """The page as it should be."""
    before, _, rest = PAGE.read_text().partition(START)
    _, _, after = rest.partition(END)
    rows = [row for package in PACKAGES for row in section(package)] + protos()
    return f"{before}{START}\n" + "\n".join(rows).lstrip("\n") + f"\n\n{END}{after}"


def main() -> None:
    wanted = page()
    if "--check" not in sys.argv[1:]:
        PAGE.write_text(wanted)
    elif wanted != PAGE.read_text():
        raise SystemExit("docs/structures.md is stale: run scripts/structures.py")


main()
