"""House rules that no linter knows: sizes, names, bounds, and what must never be written down."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOLDERS = (
    "common",
    "kvstore",
    "prefill",
    "decode",
    "gateway",
    "infra",
    "benchmarks",
    "examples",
    "tests",
)
FILE_LINES_MAX = 400
FUNCTION_LINES_MAX = 70
BANNED_NAMES = re.compile(r"(manager|helper|handler|utils?|base)\w*$|^Base[A-Z]", re.IGNORECASE)
# A module of the wire may call what it is given a handler; a class may not be named so.
BANNED_FILES = {"utils.py", "util.py", "helpers.py", "misc.py", "manager.py", "base.py"}
# Written in two halves, so that this file is not what it looks for.
MARKS = re.compile(r"\b(FIX" + r"ME|XX" + r"X|TO" + r"DO(?!\([a-z]+\)))\b")
REGISTRIES = re.compile(
    r"(pypi|pythonhosted|download\.pytorch|registry\.npmjs|deb\.debian)" + r"\.(org|com)"
)
TEXTS = (".py", ".toml", ".txt", ".md", ".yml", ".yaml", ".json", ".cfg", "")


def sources() -> Iterator[Path]:
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            if not {"namespace", "__pycache__"} & set(path.relative_to(ROOT).parts):
                yield path


def texts() -> Iterator[Path]:
    yield from (path for path in ROOT.iterdir() if path.is_file() and path.suffix in TEXTS)
    yield from (ROOT / ".ci").iterdir()
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*")):
            parts = path.relative_to(ROOT).parts
            if path.is_file() and path.suffix in TEXTS and "__pycache__" not in parts:
                yield path


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


SOURCES = list(sources())


@pytest.mark.parametrize("path", SOURCES, ids=name)
def test_sizes(path: Path) -> None:
    text = path.read_text()
    assert text.count("\n") <= FILE_LINES_MAX, f"split {name(path)} by noun"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            assert lines <= FUNCTION_LINES_MAX, f"{node.name} has {lines} lines"


@pytest.mark.parametrize("path", SOURCES, ids=name)
def test_names_and_docstrings(path: Path) -> None:
    assert path.name not in BANNED_FILES
    tree = ast.parse(path.read_text())
    assert ast.get_docstring(tree), "a module says what it knows"
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            assert not BANNED_NAMES.search(node.name), node.name


@pytest.mark.parametrize("path", SOURCES, ids=name)
def test_nothing_is_unbounded_or_swallowed(path: Path) -> None:
    lines = path.read_text().splitlines()
    for node in ast.walk(ast.parse("\n".join(lines))):
        if isinstance(node, ast.Call) and not (node.args or node.keywords):
            called = ast.unparse(node.func).removeprefix("anyio.").removeprefix("asyncio.")
            # A comment above may say what keeps the bound instead.
            is_bounded = "bound" in lines[node.lineno - 2]
            names = {"Queue", "queue.Queue", "SimpleQueue", "queue.SimpleQueue"}
            assert is_bounded or called not in names, f"line {node.lineno}: a queue without a bound"
        if isinstance(node, ast.Call) and "create_memory_object_stream" in ast.unparse(node.func):
            bound = ast.unparse(node.args[0]) if node.args else "0"
            assert "inf" not in bound, f"line {node.lineno}: a stream without a bound"
        if isinstance(node, ast.ExceptHandler):
            caught = ast.unparse(node.type) if node.type is not None else "BaseException"
            swallows = all(isinstance(each, ast.Pass) for each in node.body)
            assert not (swallows and caught in {"Exception", "BaseException"}), (
                f"line {node.lineno}: an error is swallowed"
            )


@pytest.mark.parametrize("path", SOURCES, ids=name)
def test_no_pickle_and_no_bare_tasks(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names = {alias.name for alias in node.names} | {getattr(node, "module", None)}
            assert not names & {"pickle", "dill", "cloudpickle"}
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            assert called not in {"asyncio.create_task", "asyncio.ensure_future"}, called


@pytest.mark.parametrize("path", sorted(set(texts())), ids=name)
def test_marks_and_hosts(path: Path) -> None:
    text = path.read_text()
    assert not (found := MARKS.search(text)), found
    assert not (found := REGISTRIES.search(text)), found
