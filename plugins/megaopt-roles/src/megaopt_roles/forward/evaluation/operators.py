"""Evaluating operators, comparisons and conditions."""

from __future__ import annotations

import ast
import functools
import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from megaopt_roles.forward.dependencies import ARGUMENT
from megaopt_roles.forward.objects.alternatives import Choice, abstract, merge_values
from megaopt_roles.forward.objects.attributes import Bound, operator_of
from megaopt_roles.forward.objects.containers import rows_gone_through
from megaopt_roles.forward.objects.frames import Closure, Frame
from megaopt_roles.forward.operations.arithmetic import arithmetic
from megaopt_roles.forward.operations.codes import equal
from megaopt_roles.forward.sources import quiet
from megaopt_roles.forward.trace import Trace
from megaopt_roles.forward.values import Flow, Weight, deps_of, is_abstract

__all__ = ["OperatorEvaluator"]

_BINARY: dict[type[ast.operator], tuple[str, Callable[[Any, Any], Any]]] = {
    ast.Add: ("+", operator.add),
    ast.Sub: ("-", operator.sub),
    ast.Mult: ("*", operator.mul),
    ast.Div: ("*", operator.truediv),
    ast.FloorDiv: ("*", operator.floordiv),
    ast.Mod: ("*", operator.mod),
    ast.Pow: ("*", operator.pow),
    ast.MatMult: ("@", operator.matmul),
    ast.LShift: ("*", operator.lshift),
    ast.RShift: ("*", operator.rshift),
    ast.BitOr: ("*", operator.or_),
    ast.BitAnd: ("*", operator.and_),
    ast.BitXor: ("*", operator.xor),
}
_COMPARE: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
    ast.In: lambda item, container: item in container,
    ast.NotIn: lambda item, container: item not in container,
}


def _compared(kind: type[ast.cmpop], left: Any, right: Any) -> bool | None:
    """Return what a comparison of two objects says; None where only their own code could tell."""
    if kind in (ast.Is, ast.IsNot):
        return bool(_COMPARE[kind](left, right))
    if kind in (ast.In, ast.NotIn) and quiet.is_plain(left):
        held = quiet.items(right)
        if held is None or not quiet.is_plain(held):
            return None
        return (left in (right if isinstance(right, str) else held)) is (kind is ast.In)
    if not (quiet.is_plain(left) and quiet.is_plain(right)):
        return None
    try:
        return bool(_COMPARE[kind](left, right))
    except (TypeError, ValueError):
        return None


class OperatorEvaluator(ABC):
    """Evaluates operators; the operands are left to the subclass.

    Args:
        trace: where everything that is seen is noted.
    """

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.assigned: dict[tuple[int, str], Any] = {}
        self.kept: list[Any] = []  # the owners in `assigned`, so that no identity is used twice
        self.uncounted: dict[int, list[Any]] = {}  # lists of any number of items, by identity

    @abstractmethod
    def evaluate(self, node: ast.expr | None, frame: Frame) -> Any:
        """Return the value of an expression."""

    @abstractmethod
    def call(self, callee: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Return the result of a call."""

    def is_uncounted(self, value: Any) -> bool:
        """True for what has some items or other: as many as a list of modules that it is gone through with."""
        return (is_abstract(value) and not rows_gone_through(value)) or id(value) in self.uncounted

    def as_uncounted(self, items: list[Any]) -> list[Any]:
        """Return a list, noted as one that stands for any number of items."""
        self.uncounted[id(items)] = items
        return items

    def truth(self, value: Any) -> bool | None:
        """Return whether a value is true; None when that is not known."""
        if is_abstract(value):
            return None
        return True if isinstance(value, Bound | Choice | Closure) else quiet.truth(value)

    def _either(self, values: list[Any]) -> Any:
        """Return a value that may be any of several; nothing is known of one of none."""
        return functools.reduce(merge_values, values) if values else Flow()

    def _binop(self, node: ast.BinOp, frame: Frame) -> Any:
        left, right = self.evaluate(node.left, frame), self.evaluate(node.right, frame)
        if not isinstance(node.op, ast.MatMult):
            return self.binary(type(node.op), left, right)
        self.trace.sites.append(node)
        try:
            return self.binary(ast.MatMult, left, right)
        finally:
            self.trace.sites.pop()

    def binary(self, kind: type[ast.operator], left: Any, right: Any) -> Any:
        """Return `left <operator> right`."""
        name = _BINARY[kind][1].__name__.strip("_")
        for owner, other, method in ((left, right, f"__{name}__"), (right, left, f"__r{name}__")):
            own = operator_of(owner, method)
            if own is not None:
                return self.call(own, [other], {})
        return self._binary_of_pythons(kind, left, right)

    def _binary_of_pythons(self, kind: type[ast.operator], left: Any, right: Any) -> Any:
        """Return `left <operator> right` of what Python and torch know how to put together."""
        symbol, function = _BINARY[kind]
        if isinstance(left, list | tuple) and isinstance(right, list | tuple):
            return [*left, *right]
        if kind is ast.BitOr and isinstance(left, dict) and isinstance(right, dict):
            return {**left, **right}
        if kind is ast.Mult and isinstance(left, list | tuple) and isinstance(right, int):
            return [*left] * right
        if isinstance(left, list | tuple) or isinstance(right, list | tuple):
            if any(is_abstract(value) for value in (left, right)):
                return self.trace.unknown(left, right)
        elif is_abstract(left) or is_abstract(right):
            if kind is ast.Pow:
                self.trace.square(left)
            return arithmetic(self.trace, symbol, left, right)
        if not (quiet.is_plain(left) and quiet.is_plain(right)):
            return Flow()
        try:
            return abstract(function(left, right))
        except Exception:  # noqa: BLE001 - any objects
            return Flow()

    def _unaryop(self, node: ast.UnaryOp, frame: Frame) -> Any:
        value = self.evaluate(node.operand, frame)
        if isinstance(node.op, ast.Not):
            known = self.truth(value)
            return Flow() if known is None else not known
        if is_abstract(value):
            return value
        if not isinstance(node.op, ast.USub):
            return value
        return -value if type(value) in (int, float) else Flow()

    def _boolop(self, node: ast.BoolOp, frame: Frame) -> Any:
        stops = isinstance(node.op, ast.Or)
        unknown: list[Any] = []
        value: Any = None
        for part in node.values:
            value = self.evaluate(part, frame)
            known = self.truth(value)
            if known is None:
                unknown.append(value)
            elif known is stops:
                return self._either([*unknown, value]) if unknown and stops else value
        return self._either(unknown) if unknown else value

    def _compare(self, node: ast.Compare, frame: Frame) -> Any:
        left = self.evaluate(node.left, frame)
        result: Any = True
        for kind, part in zip(node.ops, node.comparators, strict=True):
            right = self.evaluate(part, frame)
            identity = isinstance(kind, ast.Is | ast.IsNot) and right is None
            if isinstance(left, Weight) and identity:
                result = isinstance(kind, ast.IsNot)
            elif is_abstract(left) or is_abstract(right):
                codes = isinstance(kind, ast.Eq) and equal(left, right)
                given = frozenset({ARGUMENT}) if deps_of((left, right)) else frozenset[Any]()
                return Flow(given, one_hot=codes, coded=codes)
            else:
                result = self._comparison(type(kind), left, right)
            if result is None:
                return Flow()
            if not result:
                return False
            left = right
        return result

    def _comparison(self, kind: type[ast.cmpop], left: Any, right: Any) -> bool | None:
        """Return what a comparison of two objects says; None where that is not known."""
        own = operator_of(right, "__contains__") if kind in (ast.In, ast.NotIn) else None
        if own is None:
            return _compared(kind, left, right)
        known = self.truth(self.call(own, [left], {}))
        return None if known is None else known is (kind is ast.In)

    def _ifexp(self, node: ast.IfExp, frame: Frame) -> Any:
        known = self.truth(self.evaluate(node.test, frame))
        if known is None:
            return merge_values(self.evaluate(node.body, frame), self.evaluate(node.orelse, frame))
        return self.evaluate(node.body if known else node.orelse, frame)
