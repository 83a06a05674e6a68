"""Finds every wait in the sources that carries no deadline of its own."""

import ast
from collections.abc import Iterator, Set
from pathlib import Path
from typing import NamedTuple

BLOCKING = frozenset({"acquire", "communicate", "get", "join", "recv", "result", "select", "wait"})
"""Methods that can block a thread. With an argument they are bounded, without one they are not."""

WRAPPERS = frozenset({"aclosing", "_closing", "suppress", "timeout"})
"""Contexts that only wrap what is awaited inside."""


class Wait(NamedTuple):
    """One wait: where it is, in which function, and what it waits for."""

    module: str
    function: str
    expression: str


def unbounded_waits(root: Path, folders: tuple[str, ...]) -> list[Wait]:
    """Waits without a deadline in all modules of these folders, in order.

    A coroutine of our own needs none: what it waits for is looked at where it is written.
    """
    paths = [path for folder in folders for path in sorted((root / folder).rglob("*.py"))]
    trees = {str(path.relative_to(root)): ast.parse(path.read_text()) for path in paths}
    own = {name for tree in trees.values() for node in ast.walk(tree) for name in _own_names(node)}
    return [wait for module, tree in trees.items() for wait in _Finder(module, own).find(tree)]


class _Finder(ast.NodeVisitor):
    def __init__(self, module: str, own: Set[str]) -> None:
        self._module = module
        self._own = own
        self._functions: list[str] = []
        self._num_timeouts = 0
        self._streams: set[str] = set()
        self._found: list[Wait] = []

    def find(self, tree: ast.AST) -> Iterator[Wait]:
        self.visit(tree)
        return iter(self._found)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self._enter(node, node.name)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self._enter(node, node.name)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
        self._enter(node, node.name)

    def visit_AsyncWith(self, node: ast.AsyncWith) -> None:
        calls = [item.context_expr for item in node.items]
        self._streams |= {name for item in node.items for name in self._own_streams(item)}
        for call in calls:
            if not self._is_own(call) and _name(call) not in WRAPPERS:
                self._note(call)
        bounded = any(ast.unparse(call).startswith("asyncio.timeout(") for call in calls)
        self._num_timeouts += bounded
        self.generic_visit(node)
        self._num_timeouts -= bounded

    def visit_AsyncFor(self, node: ast.AsyncFor) -> None:
        if not self._is_own(node.iter):
            self._note(node.iter)
        self.generic_visit(node)

    def visit_Await(self, node: ast.Await) -> None:
        if not self._is_own(node.value) and not _is_sleep(node.value) and not _has_timeout(node.value):
            self._note(node.value)
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        if isinstance(node.func, ast.Attribute) and node.func.attr in BLOCKING and not node.args and not node.keywords:
            self._note(node)
        self.generic_visit(node)

    def _enter(self, node: ast.AST, name: str) -> None:
        """What is inside a function does not run inside the timeout around its definition."""
        self._functions.append(name)
        outside, self._num_timeouts = self._num_timeouts, 0
        self.generic_visit(node)
        self._num_timeouts = outside
        self._functions.pop()

    def _is_own(self, node: ast.expr) -> bool:
        if isinstance(node, ast.Name):
            return node.id in self._streams
        # The library's server has methods named like our own.
        library = self._module == "transfer/control/server.py" and ast.unparse(node).startswith("self._server.")
        return isinstance(node, ast.Call) and _name(node) in self._own and not library

    def _own_streams(self, item: ast.withitem) -> Iterator[str]:
        """The name under which `aclosing` gives back a stream of our own."""
        call, name = item.context_expr, item.optional_vars
        wraps = isinstance(call, ast.Call) and _name(call) in WRAPPERS and all(map(self._is_own, call.args))
        if wraps and isinstance(name, ast.Name):
            yield name.id

    def _note(self, node: ast.expr) -> None:
        wait = Wait(self._module, ".".join(self._functions), ast.unparse(node))
        if not self._num_timeouts and wait not in self._found:
            self._found.append(wait)


def _own_names(node: ast.AST) -> Iterator[str]:
    """Coroutines, async generators, their declarations in protocols, and classes that are async contexts."""
    match node:
        case ast.AsyncFunctionDef(name=name):
            yield name
        case ast.FunctionDef(name=name, returns=ast.Subscript(value=ast.Name(id="AsyncIterator" | "AsyncGenerator"))):
            yield name
        case ast.ClassDef(name=name) if any(getattr(part, "name", "") == "__aenter__" for part in node.body):
            yield name


def _name(node: ast.expr) -> str:
    if not isinstance(node, ast.Call):
        return ""
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")


def _is_sleep(node: ast.expr) -> bool:
    return ast.unparse(node).startswith("asyncio.sleep(")


def _has_timeout(node: ast.expr) -> bool:
    calls = [inner for inner in ast.walk(node) if isinstance(inner, ast.Call)]
    return any("timeout" in (keyword.arg or "") for call in calls for keyword in call.keywords)
