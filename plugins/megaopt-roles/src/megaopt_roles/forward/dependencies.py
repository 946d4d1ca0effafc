"""What values depend on: calls, parts of what they returned, and marks among them."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from typing import Any

from attrs import define, frozen
from torch import nn

__all__ = [
    "ARGUMENT",
    "GUESSED",
    "JOINED",
    "NUMBER",
    "Call",
    "Part",
    "call_behind",
    "guessed",
    "is_mark",
    "of_all",
]

ARGUMENT = "argument"
"""The dependency of a value on what the caller passed."""

GUESSED = "guessed"
"""Among the dependencies of a value: it is a part of something unknown, and may come from any of them."""

JOINED = "joined"
"""Among the dependencies of a value: it was put together of several, side by side; nothing was added to it since."""

NUMBER = "number"
"""Among the dependencies of a value: it is a loss, or a sum of all entries. Nothing with features was added since."""


def is_mark(dep: Any) -> bool:
    """True for what stands among dependencies and is no call.

    Args:
        dep: one of the dependencies of a value.
    """
    return isinstance(dep, str)


@define(eq=False)
class Call:
    """One call of a child module, or one product with a weight.

    Args:
        module: what was called, or the weight.
        deps: what its arguments depend on.
        order: position among the calls of one evaluation.
        site: where in the source it stands: the expressions around it, from the outermost call inwards. The calls of
            one module in the rounds of a loop have the same.
    """

    module: nn.Module | nn.Parameter
    deps: frozenset[Any]
    order: int
    site: tuple[ast.expr, ...] = ()
    by_row: bool = False
    """The rows of a weight do not become features of the result, but lie beside what they were multiplied with."""
    stacked: bool = False
    """It is a product with a stack of matrices, which a view may have made of one."""
    coded: bool = False
    """All that it takes are one-hot codes, made where it is called."""
    blank: bool = False
    """It takes zeros or noise, made where it is called: they stand in for something that is not given."""
    aside: bool = False
    """A method makes it that the forward, which calls layers itself, does not call."""
    cut_off: bool = False
    """No gradient flows through it."""
    slope: bool = False
    """It stands for the gradient of what it returned: what takes that does not take what it returned."""


@frozen
class Part:
    """One item of the tuple that a call returned.

    Args:
        call: the call.
        index: position of the item.
    """

    call: Call
    index: int

    @property
    def module(self) -> nn.Module | nn.Parameter:
        """What was called."""
        return self.call.module

    @property
    def deps(self) -> frozenset[Any]:
        """What the arguments of the call depend on."""
        return self.call.deps

    @property
    def order(self) -> int:
        """Position among the calls of one evaluation."""
        return self.call.order


def of_all(several: Iterable[frozenset[Any]]) -> frozenset[Any]:
    """Return what a value depends on that is made of several, or is one of them: a number only where all are.

    Args:
        several: what each depends on.
    """
    found = [deps for deps in several if deps]
    together = frozenset[Any]().union(*found)
    return together if all(NUMBER in deps for deps in found) else together - {NUMBER}


def guessed(deps: frozenset[Any]) -> frozenset[Any]:
    """Return what a part of an unknown value depends on.

    Args:
        deps: what the value depends on: where that is several calls, which of them the part comes from is not known.
    """
    several = sum(not is_mark(dep) for dep in deps) > 1
    return deps | {GUESSED} if several else deps


def call_behind(dep: Any) -> Call:
    """Return the call that a dependency is, or that returned the tuple of which it is an item.

    Args:
        dep: one of the dependencies of a value, but no mark.
    """
    call: Call = dep.call if isinstance(dep, Part) else dep
    return call
