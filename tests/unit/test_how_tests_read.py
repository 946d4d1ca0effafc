"""Tests read alike: one sentence says what holds, helpers are typed, fixtures are found by name."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

pytestmark = pytest.mark.any_python

ROOT = Path(__file__).parents[2]

ON_PAGES = {"megaopt-rows", "megaopt-signum"}
"""Distributions that pages print in full: they are as short as a reader wants them."""

SEVERAL_SENTENCES = re.compile(r"[.!?] +[A-Z]|\n")


def _test_files() -> list[Path]:
    """Every Python file of tests, but for models that stay as their authors wrote them."""
    folders = [ROOT / "tests", *sorted(ROOT.glob("plugins/*/tests"))]
    files = [path for folder in folders for path in sorted(folder.rglob("*.py"))]
    return [path for path in files if not {"build", "unseen", *ON_PAGES} & set(path.relative_to(ROOT).parts)]


@cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def _functions(body: list[ast.stmt], owner: str = "") -> Iterator[tuple[str, ast.FunctionDef]]:
    """Yield the functions of a module and the methods of its classes, by name; what is inside of them is theirs."""
    for node in body:
        if isinstance(node, ast.FunctionDef):
            yield f"{owner}{node.name}", node
        elif isinstance(node, ast.ClassDef):
            yield from _functions(node.body, f"{owner}{node.name}.")
        elif isinstance(node, ast.If):
            yield from _functions([*node.body, *node.orelse], owner)


def _all_functions() -> Iterator[tuple[str, str, ast.FunctionDef]]:
    """Yield where each function is, its name and itself."""
    for path in _test_files():
        for name, function in _functions(_tree(path).body):
            yield f"{path.relative_to(ROOT)}:{function.lineno} {name}", name, function


def _is_typed(name: str, function: ast.FunctionDef) -> bool:
    """Return whether everything but `self` or `cls` has a type."""
    arguments = [*function.args.posonlyargs, *function.args.args]
    is_static = any(
        isinstance(each, ast.Name) and each.id == "staticmethod" for each in function.decorator_list
    )
    if "." in name and not is_static:
        del arguments[0]
    arguments += function.args.kwonlyargs
    arguments += [each for each in (function.args.vararg, function.args.kwarg) if each is not None]
    return function.returns is not None and all(each.annotation is not None for each in arguments)


def test_every_test_says_in_a_sentence_what_holds() -> None:
    """In its docstring: one line, one sentence; what a reader should know besides is a comment."""
    wrong = [
        where
        for where, name, function in _all_functions()
        if name.startswith("test_")
        and (
            not (said := ast.get_docstring(function))
            or not said.endswith(".")
            or SEVERAL_SENTENCES.search(said.removesuffix("."))
        )
    ]
    assert wrong == []


def test_helpers_and_fixtures_of_tests_are_typed() -> None:
    """Every argument, and what is returned, of functions and of methods: whoever uses one need not read it."""
    untyped = [
        where
        for where, name, function in _all_functions()
        if not name.startswith("test_") and not _is_typed(name, function)
    ]
    assert untyped == []


def _is_fixture(function: ast.FunctionDef) -> bool:
    return any("pytest.fixture" in ast.unparse(each) for each in function.decorator_list)


def test_fixtures_are_found_by_name() -> None:
    """No test file imports one: a fixture that several files want is in their `conftest.py`."""
    brought = sorted(ROOT.glob("plugins/megaopt-testing/src/**/*.py"))
    fixtures = {
        (path.stem, name)
        for path in [*_test_files(), *brought]
        for name, function in _functions(_tree(path).body)
        if _is_fixture(function)
    }
    imported = [
        f"{path.relative_to(ROOT)}: {alias.name}"
        for path in _test_files()
        if path.name != "conftest.py"
        for node in _tree(path).body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if ((node.module or "").rpartition(".")[2], alias.name) in fixtures
    ]
    assert {("conftest", "launch"), ("fake_plugins", "plugins")} <= fixtures
    assert imported == []


def test_helpers_of_tests_have_names_of_their_own() -> None:
    """Test files import what lies beside them by name: of two with one name, whole runs would take either."""
    own = [path for path in _test_files() if "src" not in path.parts]
    helpers = [path.name for path in own if not path.name.startswith("test_") and path.name != "conftest.py"]
    assert sorted({name for name in helpers if helpers.count(name) > 1}) == []
