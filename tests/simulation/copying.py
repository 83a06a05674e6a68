"""Copies of whole worlds, and what tells two of them apart.

A copy shares what never changes (frozen records, arrays of indices, functions) and has its own of everything else;
bound methods and closures are bound to the copies.
"""

import dataclasses
import enum
import types
from collections import deque
from collections.abc import Callable, Hashable
from typing import Any

import numpy as np
import torch

from kvferry.transfer.plan import PairPlanner

Memo = dict[int, Any]
Copier = Callable[[Any, Memo], Any]

_ATOMS = (
    int,
    float,
    str,
    bytes,
    bool,
    complex,
    type(None),
    type,
    types.BuiltinFunctionType,
    types.ModuleType,
    np.ndarray,
)
_SHARED = (PairPlanner,)


def clone(thing: Any) -> Any:
    """A copy that nothing done to the original changes."""
    return _copy(thing, {})


def _copy(thing: Any, memo: Memo) -> Any:
    kind = type(thing)
    copier = _COPIERS.get(kind)
    if copier is None:
        copier = _COPIERS[kind] = _copier_of(kind)
    return copier(thing, memo)


def _copier_of(kind: type) -> Copier:
    frozen = dataclasses.is_dataclass(kind) and kind.__dataclass_params__.frozen  # type: ignore[attr-defined]
    if frozen or issubclass(kind, (*_ATOMS, *_SHARED, enum.Enum)):
        return _share
    if issubclass(kind, tuple):
        return _copy_tuple
    return _copy_object


def _share(thing: Any, memo: Memo) -> Any:
    return thing


def _copy_tuple(thing: Any, memo: Memo) -> Any:
    parts = [_copy(part, memo) for part in thing]
    if all(part is old for part, old in zip(parts, thing, strict=True)):
        return thing
    return tuple(parts) if type(thing) is tuple else type(thing)(*parts)


def _copy_list(thing: Any, memo: Memo) -> Any:
    found = memo.get(id(thing))
    if found is None:
        found = memo[id(thing)] = type(thing)()
        for part in thing:
            found.append(_copy(part, memo))
    return found


def _copy_set(thing: Any, memo: Memo) -> Any:
    found = memo.get(id(thing))
    if found is None:
        found = memo[id(thing)] = {_copy(part, memo) for part in thing}
    return found


def _copy_dict(thing: Any, memo: Memo) -> Any:
    found = memo.get(id(thing))
    if found is None:
        found = memo[id(thing)] = {}
        for key, value in thing.items():
            found[_copy(key, memo)] = _copy(value, memo)
    return found


def _copy_object(thing: Any, memo: Memo) -> Any:
    found = memo.get(id(thing))
    if found is None:
        found = memo[id(thing)] = object.__new__(type(thing))
        fields = found.__dict__
        for name, value in thing.__dict__.items():
            fields[name] = _copy(value, memo)
    return found


def _copy_method(thing: types.MethodType, memo: Memo) -> Any:
    return types.MethodType(thing.__func__, _copy(thing.__self__, memo))


def _copy_function(thing: types.FunctionType, memo: Memo) -> Any:
    if thing.__closure__ is None:
        return thing
    found = memo.get(id(thing))
    if found is None:
        cells = tuple(_copy(cell, memo) for cell in thing.__closure__)
        if all(cell is old for cell, old in zip(cells, thing.__closure__, strict=True)):
            return thing
        found = types.FunctionType(thing.__code__, thing.__globals__, thing.__name__, thing.__defaults__, cells)
        found.__kwdefaults__ = thing.__kwdefaults__
        memo[id(thing)] = found
    return found


def _copy_cell(thing: types.CellType, memo: Memo) -> Any:
    found = memo.get(id(thing))
    if found is None:
        content = thing.cell_contents
        copied = _copy(content, memo)
        found = memo[id(thing)] = thing if copied is content else types.CellType(copied)
    return found


def _copy_tensor(thing: torch.Tensor, memo: Memo) -> Any:
    found = memo.get(id(thing))
    if found is None:
        found = memo[id(thing)] = thing.clone()
    return found


_COPIERS: dict[type, Copier] = {
    list: _copy_list,
    deque: _copy_list,
    set: _copy_set,
    frozenset: _share,
    dict: _copy_dict,
    types.MethodType: _copy_method,
    types.FunctionType: _copy_function,
    types.CellType: _copy_cell,
    torch.Tensor: _copy_tensor,
}


class Digester:
    """Turns a world into a value that is equal for worlds in which the same can happen.

    Moments are taken relative to the clock, and objects are named by the order in which they are met.

    Args:
        now: the world's clock.
        ignored: names of attributes that change nothing of what can happen.
    """

    def __init__(self, now: float, ignored: frozenset[str]) -> None:
        self._now = now
        self._ignored = ignored
        self._met: dict[int, int] = {}
        self._parts: list[Hashable] = []
        self.timeless = True

    def digest(self, thing: Any) -> int:
        self._walk(thing)
        return hash(tuple(self._parts))

    def _walk(self, thing: Any) -> None:
        kind = type(thing)
        walker = _WALKERS.get(kind)
        if walker is None:
            walker = _WALKERS[kind] = _walker_of(kind)
        walker(self, thing)

    def atom(self, thing: Any) -> None:
        self._parts.append(thing)

    def moment(self, thing: float) -> None:
        if thing > 500_000.0:
            self.timeless = False
            thing = round(thing - self._now, 3)
        self._parts.append(thing)

    def array(self, thing: Any) -> None:
        self._parts.append(thing.tobytes())

    def tensor(self, thing: torch.Tensor) -> None:
        self._parts.append(thing.numpy().tobytes())

    def sequence(self, thing: Any) -> None:
        if self._is_new(thing):
            self._parts.append(len(thing))
            for part in thing:
                self._walk(part)

    def mapping(self, thing: Any) -> None:
        if self._is_new(thing):
            self._parts.append(len(thing))
            for key, value in thing.items():
                self._walk(key)
                self._walk(value)

    def unordered(self, thing: Any) -> None:
        self._parts.append(tuple(sorted(map(str, thing))))

    def fields(self, thing: Any) -> None:
        if self._is_new(thing):
            kind = type(thing)
            self._parts.append(kind.__name__)
            ignored = self._ignored
            for name, value in thing.__dict__.items():
                if name not in ignored:
                    self._walk(value)

    def record(self, thing: Any) -> None:
        """A frozen record is what it says, and says the same for ever unless it names a moment."""
        known = _RECORDS.get(id(thing))
        if known is None:
            inner = Digester(self._now, self._ignored)
            inner._parts.append(type(thing).__name__)
            for value in vars(thing).values():
                inner._walk(value)
            known = (thing, hash(tuple(inner._parts)))
            if inner.timeless:
                _RECORDS[id(thing)] = known
            self.timeless = self.timeless and inner.timeless
        self._parts.append(known[1])

    def nothing(self, thing: Any) -> None:
        """Code and what never changes."""

    def _is_new(self, thing: Any) -> bool:
        number = self._met.get(id(thing))
        self._parts.append(number)
        if number is None:
            self._met[id(thing)] = len(self._met)
        return number is None


_RECORDS: dict[int, tuple[Any, int]] = {}
"""What frozen records say, by identity; each is kept alive, so that no other gets its identity."""

Walker = Callable[[Digester, Any], None]


def _walker_of(kind: type) -> Walker:
    if issubclass(kind, enum.Enum):
        return lambda digester, thing: digester.atom(thing.name)
    if issubclass(kind, np.ndarray):
        return Digester.array
    if issubclass(kind, tuple):
        return Digester.sequence
    if issubclass(kind, (*_SHARED, types.BuiltinFunctionType, type, types.ModuleType)):
        return Digester.nothing
    if dataclasses.is_dataclass(kind) and kind.__dataclass_params__.frozen:  # type: ignore[attr-defined]
        return Digester.record
    return Digester.fields


_WALKERS: dict[type, Walker] = {
    int: Digester.atom,
    str: Digester.atom,
    bytes: Digester.atom,
    bool: Digester.atom,
    type(None): Digester.atom,
    float: Digester.moment,
    list: Digester.sequence,
    deque: Digester.sequence,
    tuple: Digester.sequence,
    set: Digester.unordered,
    frozenset: Digester.unordered,
    dict: Digester.mapping,
    torch.Tensor: Digester.tensor,
    types.MethodType: Digester.nothing,
    types.FunctionType: Digester.nothing,
}
