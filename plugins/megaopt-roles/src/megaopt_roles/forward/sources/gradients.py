"""Where no gradient flows: in a `with torch.no_grad():`, and in functions that it decorates."""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["is_cut_off", "stops_gradients"]

_STOPPING = (torch.no_grad, torch.inference_mode)


def stops_gradients(node: ast.expr, value: Callable[[ast.expr], Any]) -> bool:
    """True for the context expression of a `with` statement in which no gradient flows.

    Args:
        node: the expression.
        value: returns the value of one.
    """
    if not isinstance(node, ast.Call):
        return False
    arguments = [*node.args, *(keyword.value for keyword in node.keywords)]
    kind = value(node.func)
    if kind is torch.set_grad_enabled:
        return [value(part) for part in arguments] == [False]
    return kind in _STOPPING and all(value(part) is True for part in arguments)


def is_cut_off(function: Callable[..., Any]) -> bool:
    """True for a function that `torch.no_grad` or `torch.inference_mode` decorates.

    Args:
        function: any function.
    """
    if not hasattr(function, "__wrapped__"):
        return False
    for cell in getattr(function, "__closure__", None) or ():
        try:
            made = getattr(cell.cell_contents, "__self__", None)
        except ValueError:  # an empty cell
            continue
        if isinstance(made, _STOPPING):
            return True
    return False
