"""The syntax tree of a function, cached, and the names that it sees."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import sys
import textwrap
import types
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

__all__ = ["function_tree", "global_of", "imported"]

_trees: dict[Any, ast.FunctionDef | None] = {}


def function_tree(function: Callable[..., Any]) -> ast.FunctionDef | None:
    """Return the syntax tree of a Python function, None when its source cannot be had.

    Args:
        function: a plain function or a bound method; decorators that keep `__wrapped__` are seen through.
    """
    function = inspect.unwrap(getattr(function, "__func__", function))
    code = getattr(function, "__code__", None)
    if code is None:
        return None
    if code not in _trees:
        _trees[code] = _parse(function)
    return _trees[code]


def _parse(function: Callable[..., Any]) -> ast.FunctionDef | None:
    try:
        if function.__name__ == "<lambda>":
            return _lambda(function.__code__, inspect.findsource(function)[0])
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError, IndentationError):
        return None
    node = tree.body[0] if tree.body else None
    return node if isinstance(node, ast.FunctionDef) else None


def _lambda(code: types.CodeType, lines: Sequence[str]) -> ast.FunctionDef | None:
    """Return a lambda as a function; None where several stand at one place.

    Args:
        code: of the lambda.
        lines: of its file.
    """
    spans = set(code.co_positions())
    found = [
        part
        for part in _lambdas("".join(lines))
        if part.lineno == code.co_firstlineno
        and (part.body.lineno, part.body.end_lineno, part.body.col_offset, part.body.end_col_offset) in spans
    ]
    return _named(found[0]) if len(found) == 1 else None


@lru_cache(maxsize=16)
def _lambdas(text: str) -> tuple[ast.Lambda, ...]:
    """Return all lambdas of a file."""
    return tuple(part for part in ast.walk(ast.parse(text)) if isinstance(part, ast.Lambda))


def _named(node: ast.Lambda) -> ast.FunctionDef:
    """Return the function that a lambda is short for."""
    body: list[ast.stmt] = [ast.Return(node.body)]
    return ast.FunctionDef(name="_", args=node.args, body=body, decorator_list=[], type_params=[])


def global_of(function: Callable[..., Any], name: str) -> tuple[bool, Any]:
    """Look a name up as the function would: closure, module, builtins.

    Args:
        function: the function.
        name: a free name in its body.

    Returns:
        Whether it was found, and its value.
    """
    function = inspect.unwrap(getattr(function, "__func__", function))
    code, closure = function.__code__, function.__closure__ or ()
    for free, cell in zip(code.co_freevars, closure, strict=False):
        if free == name:
            try:
                return True, cell.cell_contents
            except ValueError:
                return False, None
    scope = getattr(function, "__globals__", {})
    if name in scope:
        return True, scope[name]
    builtins = scope.get("__builtins__", {})
    builtins = builtins if isinstance(builtins, dict) else vars(builtins)
    return name in builtins, builtins.get(name)


def imported(function: Callable[..., Any], module: str, name: str = "") -> Any:
    """Return what an import inside a function gives; nothing is imported, and what was not yet is not known.

    Args:
        function: the function, relative to whose package a module may be.
        module: name of the module, with leading dots where it is relative.
        name: of what is imported from it; empty for the module itself.

    Returns:
        None where it is not known.
    """
    package = inspect.unwrap(function).__globals__.get("__package__")
    if module.startswith("."):
        try:
            module = importlib.util.resolve_name(module, package)
        except ImportError:
            return None
    found = sys.modules.get(module)
    if not name or not isinstance(found, types.ModuleType):
        return found
    return vars(found).get(name, sys.modules.get(f"{module}.{name}"))
