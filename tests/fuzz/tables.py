"""How many entries the tables of kvferry's objects hold, found by looking at the objects themselves."""

from collections import deque
from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from typing import Any

MAX_DEPTH = 8

Sizes = dict[str, int]


def table_sizes(**roots: object) -> Sizes:
    """Entries of every container that can be reached from these objects, summed by the path to it.

    A path is made of attribute names, so tables that are added later are found too. Only objects of kvferry's own
    classes are looked into, each once.
    """
    sizes: Sizes = {}
    seen: set[int] = set()
    for name, root in roots.items():
        for path, size in _containers(name, root, seen, 0):
            sizes[path] = sizes.get(path, 0) + size
    return sizes


def grown(before: Sizes, now: Sizes, allowed: Mapping[str, int]) -> dict[str, tuple[int, int]]:
    """Tables that hold more than before, and more than is allowed where their path contains one of these names."""
    return {
        path: (before.get(path, 0), size)
        for path, size in now.items()
        if size > max([before.get(path, 0), *(bound for name, bound in allowed.items() if name in path)])
    }


def _containers(path: str, value: object, seen: set[int], depth: int) -> Iterator[tuple[str, int]]:
    if depth > MAX_DEPTH or id(value) in seen:
        return
    if isinstance(value, Mapping | AbstractSet | list | deque):
        seen.add(id(value))
        yield path, len(value)
        items: list[Any] = list(value.values()) if isinstance(value, Mapping) else list(value)
        for item in items:
            yield from _containers(path + "[]", item, seen, depth + 1)
    elif type(value).__module__.startswith("kvferry."):
        seen.add(id(value))
        for name, inner in _attributes(value):
            yield from _containers(f"{path}.{name}", inner, seen, depth + 1)


def _attributes(value: object) -> list[tuple[str, object]]:
    named = dict(getattr(value, "__dict__", {}))
    for kind in type(value).__mro__:
        slots = getattr(kind, "__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if hasattr(value, name):
                named[name] = getattr(value, name)
    return list(named.items())
