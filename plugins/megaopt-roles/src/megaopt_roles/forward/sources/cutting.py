"""Whether the source of a module cuts anything apart: looked up before shapes are guessed in several ways."""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import Any

from torch import nn

from megaopt_roles.forward.sources.module_classes import own_methods
from megaopt_roles.forward.sources.trees import function_tree

__all__ = ["is_cut", "may_split"]

_CUTTING = frozenset(
    ["chunk", "split", "split_with_sizes", "tensor_split", "unbind", "glu", "GLU", "rearrange"]
)


def may_split(module: nn.Module, forward: Callable[..., Any] | None) -> bool:
    """True for a module in whose methods something is cut: the shapes of activations matter there.

    Args:
        module: the module.
        forward: its forward, where it has one.
    """
    return any(
        _mentions_cut(function) for function in (forward, *own_methods(module)) if function is not None
    )


_mentions: dict[int, bool] = {}


def _mentions_cut(function: Callable[..., Any]) -> bool:
    tree = function_tree(function)
    if tree is None:
        return False
    if id(tree) not in _mentions:
        _mentions[id(tree)] = any(is_cut(node) for node in ast.walk(tree))
    return _mentions[id(tree)]


def is_cut(node: ast.AST) -> bool:
    """True for an expression that takes something apart, as a method or a function of torch does, or an index.

    Args:
        node: any node of a syntax tree.
    """
    if isinstance(node, ast.Attribute):
        return node.attr in _CUTTING
    return isinstance(node, ast.Subscript) or (isinstance(node, ast.Name) and node.id in _CUTTING)
