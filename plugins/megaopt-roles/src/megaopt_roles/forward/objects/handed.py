"""Activations that a module is handed, beside its own, and takes apart: shifts and scales that its model made."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from megaopt_roles.forward.sources.cutting import is_cut
from megaopt_roles.forward.sources.module_classes import own_methods
from megaopt_roles.forward.sources.trees import function_tree
from megaopt_roles.forward.values import Flow, deps_of, flows_of

__all__ = ["are_cut", "puts_more", "without_rows"]


def are_cut(
    module: nn.Module, forward: Callable[..., Any], names: dict[str, Any]
) -> frozenset[tuple[str, int]]:
    """Return the arguments with rows of a projection that a module takes apart: their names, and whose rows they hold.

    Its first argument, a stream, is not among them.

    Args:
        module: the module, of more than a few layers.
        forward: its forward.
        names: the arguments of its forward by name, itself and the first one at the beginning.
    """
    held = {
        name: id(value.piece)
        for name, value in list(names.items())[2:]
        if isinstance(value, Flow) and value.piece is not None and value.tensor is not None
    }
    if not held:
        return frozenset()
    trees = [function_tree(function) for function in (forward, *own_methods(module))]
    cut = {name for tree in trees if tree is not None for name in held if _cuts(tree, name)}
    return frozenset((name, held[name]) for name in cut)


def puts_more(forward: Callable[..., Any], names: dict[str, Any]) -> bool:
    """True for a forward that puts more activations into a dictionary of some, or returns what goes into one.

    Args:
        forward: of any module.
        names: its arguments by name.
    """
    boards = {name for name, value in names.items() if isinstance(value, dict) and flows_of(value)}
    tree = function_tree(forward) if boards else None
    return tree is not None and any(_is_put(node, boards) for node in ast.walk(tree))


def _is_put(node: ast.AST, boards: set[str]) -> bool:
    """True for what changes a dictionary, makes a larger one of it, or returns one with names that are spelled out."""
    match node:
        case ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr="update" | "setdefault")):
            return name in boards
        case ast.Subscript(value=ast.Name(id=name), ctx=ast.Store()):
            return name in boards
        case ast.Call(func=ast.Name(id="dict"), args=[ast.Name(id=name), *_]):
            return name in boards
        case ast.BinOp(left=left, op=ast.BitOr(), right=right):
            return any(isinstance(side, ast.Name) and side.id in boards for side in (left, right))
        case ast.Dict(keys=keys, values=values) if None in keys:
            return any(isinstance(part, ast.Name) and part.id in boards for part in values)
        case ast.Return(value=ast.Dict(keys=keys)):
            return bool(keys) and all(isinstance(key, ast.Constant) for key in keys)
    return False


def without_rows(value: Any) -> Any:
    """Return a value of which no cut is noted: an activation keeps its shape.

    Args:
        value: any argument.
    """
    if isinstance(value, Flow):
        return Flow(value.deps, None if value.tensor is None else value.tensor.to("meta"))
    return Flow(deps_of(value)) if flows_of(value) else value


_known: dict[tuple[int, str], bool] = {}


def _cuts(tree: ast.FunctionDef, name: str) -> bool:
    """True for a function that takes what it calls so apart, or what it makes of that without a layer."""
    key = (id(tree), name)
    if key not in _known:
        _known[key] = _finds_cut(tree, name)
    return _known[key]


def _finds_cut(tree: ast.FunctionDef, name: str) -> bool:
    made = {name}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and made & set(_named(node.value)):
            made |= {
                part.id for target in node.targets for part in ast.walk(target) if isinstance(part, ast.Name)
            }
    return any(made & set(_cut_by(node)) for node in ast.walk(tree))


def _cut_by(node: ast.AST) -> Iterator[str]:
    """Yield the names in what an expression takes apart; the shape of something is nothing of it."""
    if isinstance(node, ast.Subscript | ast.Attribute) and is_cut(node):
        yield from _named(node.value)
    elif isinstance(node, ast.Call) and is_cut(node.func):
        for argument in node.args[:1]:
            yield from _named(argument)


def _named(node: ast.AST) -> Iterator[str]:
    """Yield the names in an expression, but those in calls of layers and in shapes."""
    if isinstance(node, ast.Name):
        yield node.id
    elif not (_is_size(node) or (isinstance(node, ast.Call) and _is_own(node.func))):
        for child in ast.iter_child_nodes(node):
            yield from _named(child)


def _is_size(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and node.attr in ("shape", "device", "dtype")


def _is_own(function: ast.AST) -> bool:
    """True for an attribute of `self`, or of something that it holds: a layer, most often."""
    while isinstance(function, ast.Attribute | ast.Subscript):
        function = function.value
    return isinstance(function, ast.Name) and function.id == "self"
