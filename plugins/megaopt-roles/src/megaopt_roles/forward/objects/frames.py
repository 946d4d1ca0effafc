"""Running functions, and functions inside of them."""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import Any

from attrs import define, field

__all__ = ["Closure", "Frame"]


@define(eq=False)
class Frame:
    """One running function.

    Args:
        function: whose globals names are looked up in.
        names: the local variables.
        outer: the frame of the enclosing function, for lambdas and nested functions.
        yielded: what it has yielded, in order.
        comprehends: of a comprehension, which binds nothing but what it loops over.
    """

    function: Callable[..., Any]
    names: dict[str, Any] = field(factory=dict)
    outer: Frame | None = None
    yielded: list[Any] = field(factory=list)
    comprehends: bool = False


@define(eq=False)
class Closure:
    """A lambda or a nested function."""

    node: ast.Lambda | ast.FunctionDef
    frame: Frame
