#!/usr/bin/env python3
"""Write the generated parts of pages in docs/; with --check, fail when one is stale.

The modules of structures.md come from their docstrings, the keys of configuration.md from the models in
deploy/config.py, the numbers and traces of pools.md from the pools themselves, see pool_pages.py, and the diagrams of
safety.md from the session tables, see safety_pages.py.
"""

import ast
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pool_pages import REGIONS as POOL_REGIONS
from pydantic import BaseModel, ByteSize
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined
from safety_pages import REGIONS as SAFETY_REGIONS

from kvferry.deploy.config import FrontendConfig, Key, WorkerConfig, variable

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
REGION = re.compile(
    r"(<!-- (?:([\w-]+): )?what follows is written by scripts/pages.py -->\n).*?"
    r"(<!-- end of what scripts/pages.py writes -->)",
    re.DOTALL,
)
"""A generated part of a page, which may have a name."""
PACKAGES = (
    "cache",
    "transfer",
    "transfer/transport",
    "transfer/control",
    "transfer/control/convert",
    "transfer/engines",
    "deploy",
)
KEY_HEADER = "| key, variable | accepted | default | meaning |\n|---|---|---|---|"
BOUNDS = (("ge", "at least"), ("gt", "above"), ("le", "at most"))
BYTE_UNITS = (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10))


# ---- docs/structures.md


def modules() -> Iterator[str]:
    """Every package with the first sentence of each of its modules, then the services of the wire."""
    for package in PACKAGES:
        paths = (path for path in sorted((ROOT / package).glob("*.py")) if path.name != "__init__.py")
        yield from (f"### {package}/", "", *(f"* `{path.stem}`: {sentence(path)}" for path in paths), "")
    protos = sorted((ROOT / "proto" / "kvferry" / "v1").glob("*.proto"))
    yield from ("### proto/kvferry/v1/", "", *(f"* `{path.name}`: {first_comment(path)}" for path in protos), "")


def sentence(path: Path) -> str:
    """First sentence of a module's docstring."""
    docstring = ast.get_docstring(ast.parse(path.read_text()))
    if not docstring:
        raise SystemExit(f"{path.relative_to(ROOT)} has no docstring: say in one sentence what it is")
    return " ".join(docstring.split("\n\n")[0].split())


def first_comment(path: Path) -> str:
    """The sentence at the top of a .proto file."""
    return path.read_text().splitlines()[0].removeprefix("//").strip()


# ---- docs/configuration.md


def configuration() -> Iterator[str]:
    """One table of keys per process."""
    for command, model in (("worker", WorkerConfig), ("frontend", FrontendConfig)):
        yield from (f"## kvferry {command}", "", KEY_HEADER)
        for key, field in keys(model):
            name = f"`{'.'.join(key)}`<br>`{variable(model.env_prefix, key)}`"
            yield f"| {name} | {accepted(field)} | {default(field)} | {field.description} |"
        yield ""


def keys(model: type[BaseModel], above: Key = ()) -> Iterator[tuple[Key, FieldInfo]]:
    """Every key that takes a value, in the order of the models."""
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from keys(field.annotation, (*above, name))
        else:
            yield (*above, name), field


def accepted(field: FieldInfo) -> str:
    """Type and bounds."""
    metadata = [*field.metadata, *(note for kind in get_args(field.annotation) for note in inner_metadata(kind))]
    bounds = [f"{words} {shown(value, field)}" for name, words in BOUNDS for value in found(metadata, name)]
    patterns = [f"matching `{pattern}`" for pattern in found(metadata, "pattern")]
    return ", ".join([kind_of(field.annotation), *bounds, *patterns])


def inner_metadata(kind: Any) -> tuple[Any, ...]:
    """Bounds of the type inside `X | None`."""
    return tuple(getattr(kind, "__metadata__", ()))


def found(metadata: list[Any], name: str) -> list[Any]:
    """The values of one kind of bound, wherever pydantic keeps it."""
    flat = [inner for note in metadata for inner in (note, *getattr(note, "metadata", ()))]
    return [value for note in flat if (value := getattr(note, name, None)) is not None]


def kind_of(annotation: Any) -> str:
    """A type in words."""
    if get_origin(annotation) is Literal:
        return " or ".join(f"`{value}`" for value in get_args(annotation))
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return " or ".join(f"`{member.value}`" for member in annotation)
    inner = [kind for kind in get_args(annotation) if kind is not type(None)]
    if inner:
        return kind_of(inner[0])
    return {ByteSize: "number or text", int: "whole number", float: "number", str: "text"}[annotation]


def default(field: FieldInfo) -> str:
    """The default as it would be written in a file."""
    if field.is_required():
        return "required"
    if field.default in (None, PydanticUndefined):
        return "none"
    return f"`{shown(field.default, field)}`"


def shown(value: Any, field: FieldInfo) -> str:
    """A value as it would be written in a file."""
    if field.annotation is ByteSize:
        units = ((name, unit) for name, unit in BYTE_UNITS if value >= unit and value % unit == 0)
        name, unit = next(units, ("", 1))
        return f"{value // unit}{name}"
    if isinstance(value, Enum):
        return str(value.value)
    return f"{value:g}" if isinstance(value, float) else str(value)


# ---- all


Regions = Mapping[str, Callable[[], Iterator[str]]]

PAGES: Mapping[str, Regions] = {
    "structures.md": {"": modules},
    "configuration.md": {"": configuration},
    "pools.md": POOL_REGIONS,
    "safety.md": SAFETY_REGIONS,
}


def page(path: Path, regions: Regions) -> str:
    """The page as it should be."""
    text = path.read_text()
    found = [match[2] or "" for match in REGION.finditer(text)]
    if sorted(found) != sorted(regions):
        raise SystemExit(f"{path.relative_to(ROOT)} has parts named {found}, written are {list(regions)}: each once")
    return REGION.sub(lambda match: f"{match[1]}\n" + "\n".join(regions[match[2] or ""]()) + f"\n{match[3]}", text)


def main() -> None:
    stale = []
    for name, regions in PAGES.items():
        wanted = page(DOCS / name, regions)
        if "--check" not in sys.argv[1:]:
            (DOCS / name).write_text(wanted)
        elif wanted != (DOCS / name).read_text():
            stale.append(f"docs/{name}")
    if stale:
        raise SystemExit(f"stale: {', '.join(stale)}: run scripts/pages.py")


main()
