"""Every fault of the list has a test on real processes, and every number that a test has is known.

It reads the tests' text: markers are written as literals, or this finds nothing.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from faults import FAULTS, ON_PROCESSES

TESTS = Path(__file__).parent


@dataclass(frozen=True)
class Marked:
    """A test function, the faults that it is marked with, and whether it starts processes."""

    name: str
    faults: frozenset[int]
    is_process: bool


def marks(decorators: Sequence[ast.expr]) -> Iterator[tuple[str, ast.expr]]:
    for each in decorators:
        called = each.func if isinstance(each, ast.Call) else each
        name = ast.unparse(called)
        if name.startswith("pytest.mark."):
            yield name.removeprefix("pytest.mark."), each


def module_marks(tree: ast.Module) -> set[str]:
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark":
            listed = node.value.elts if isinstance(node.value, ast.List) else [node.value]
            return {name for name, _ in marks(listed)}
    return set()


def number_of(mark: ast.expr, where: str) -> int:
    assert isinstance(mark, ast.Call) and not mark.args, f"{where}: fault(number=…)"
    (keyword,) = mark.keywords
    assert keyword.arg == "number" and isinstance(keyword.value, ast.Constant), where
    number = keyword.value.value
    assert isinstance(number, int), where
    return number


def marked(path: Path) -> Iterator[Marked]:
    tree = ast.parse(path.read_text())
    of_module = module_marks(tree)
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            name = f"{path.name}::{node.name}"
            own = list(marks(node.decorator_list))
            numbers = frozenset(number_of(mark, name) for kind, mark in own if kind == "fault")
            is_process = "process" in of_module | {kind for kind, _ in own}
            yield Marked(name, numbers, is_process and node.name.startswith("test_"))


ALL = [each for path in sorted(TESTS.rglob("test_*.py")) for each in marked(path)]


@pytest.mark.parametrize("number", sorted(ON_PROCESSES))
def test_a_fault_has_a_test_on_real_processes(number: int) -> None:
    assert any(number in each.faults and each.is_process for each in ALL), FAULTS[number]


def test_every_marked_number_is_described() -> None:
    found = {number for each in ALL for number in each.faults}
    assert found == set(FAULTS)
