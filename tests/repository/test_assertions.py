import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.repository.sources import ROOT, parsed

TEST_FILES = sorted((ROOT / "tests").rglob("test_*.py"))
# Calls that fail a test by themselves.
CHECKS = {"fail", "raises", "wait_until", "warns"}
CHECK_PREFIXES = ("assert_", "check_", "expect_")

Function = ast.FunctionDef | ast.AsyncFunctionDef


def functions(tree: ast.AST) -> Iterator[Function]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def calls(function: Function) -> set[str]:
    """Last part of the name of everything a function calls."""
    called = (node.func for node in ast.walk(function) if isinstance(node, ast.Call))
    names = (getattr(target, "attr", None) or getattr(target, "id", None) for target in called)
    return {name for name in names if name}


def checking(tree: ast.AST) -> set[str]:
    """Names of the functions that check something, themselves or through others of the same file."""
    bodies = {function.name: function for function in functions(tree)}
    found = {name for name, body in bodies.items() if any(isinstance(node, ast.Assert) for node in ast.walk(body))}
    found |= {name for name in {*CHECKS, *(call for body in bodies.values() for call in calls(body))} if _checks(name)}
    while more := {name for name, body in bodies.items() if name not in found and calls(body) & found}:
        found |= more
    return found


def _checks(name: str) -> bool:
    return name in CHECKS or name.startswith(CHECK_PREFIXES)


@pytest.mark.parametrize("path", [pytest.param(path, id=str(path.relative_to(ROOT))) for path in TEST_FILES])
def test_every_test_checks_something(path: Path) -> None:
    tree = parsed(path)
    tests = {function.name for function in functions(tree) if function.name.startswith("test_")}

    assert tests, "a test file without a test"
    assert not tests - checking(tree)


def test_checking_follows_calls_and_finds_idle_tests() -> None:
    tree = ast.parse(
        "def helper():\n  assert x\n"
        "def test_direct():\n  with pytest.raises(E): f()\n"
        "def test_through():\n  helper()\n"
        "def test_elsewhere():\n  pool.check_integrity()\n"
        "def test_idle():\n  f()\n"
    )

    assert checking(tree) & {"test_direct", "test_through", "test_elsewhere", "test_idle"} == {
        "test_direct",
        "test_through",
        "test_elsewhere",
    }
