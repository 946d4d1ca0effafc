"""Evaluating expressions: displays, comprehensions, and those that hold others."""

from __future__ import annotations

import ast
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

from megaopt_roles.forward.evaluation.items import ItemEvaluator
from megaopt_roles.forward.objects.alternatives import abstract
from megaopt_roles.forward.objects.containers import entries, items_of
from megaopt_roles.forward.objects.frames import Closure, Frame
from megaopt_roles.forward.sources import quiet
from megaopt_roles.forward.values import Flow

__all__ = ["ExpressionEvaluator"]

_method_names: dict[type, str] = {}


def _method_of(kind: type) -> str:
    """Return the name of the method that evaluates a kind of expression."""
    return _method_names.get(kind) or _method_names.setdefault(kind, f"_{kind.__name__.lower()}")


class ExpressionEvaluator(ItemEvaluator):
    """Evaluates expressions; calls are left to the subclass.

    Args:
        trace: where everything that is seen is noted.
    """

    @abstractmethod
    def call_node(self, node: ast.Call, frame: Frame) -> Any:
        """Return the value of a call expression."""

    def evaluate(self, node: ast.expr | None, frame: Frame) -> Any:
        """Return the value of an expression.

        Args:
            node: the expression.
            frame: the running function.
        """
        self.trace.spend()
        if node is None:
            return None
        method = getattr(self, _method_of(type(node)), None)
        if method is None:
            return Flow()
        return method(node, frame)

    def _constant(self, node: ast.Constant, frame: Frame) -> Any:
        return node.value

    def _tuple(self, node: ast.Tuple | ast.List, frame: Frame) -> list[Any]:
        return self._elements(node.elts, frame)

    _list = _tuple

    def _elements(self, nodes: Sequence[ast.expr], frame: Frame) -> list[Any]:
        values: list[Any] = []
        for node in nodes:
            if isinstance(node, ast.Starred):
                value = self.evaluate(node.value, frame)
                held = quiet.items(value)
                several = [self.trace.unknown(value)] * self._count_of_sizes(node.value, frame)
                values.extend(several if held is None else map(abstract, held))
            else:
                values.append(self.evaluate(node, frame))
        return values

    def _count_of_sizes(self, node: ast.expr, frame: Frame) -> int:
        """Return how many sizes there are in `x.shape[:n]`, of a shape that is not known; one in anything else."""
        match node:
            case ast.Subscript(
                value=ast.Attribute(attr="shape") | ast.Call(func=ast.Attribute(attr="size"), args=[]),
                slice=ast.Slice(lower=None, upper=ast.expr() as upper, step=None),
            ):
                stop = self.evaluate(upper, frame)
                return len(range(self.trace.rank)[:stop]) if isinstance(stop, int) else 1
        return 1

    def _dict(self, node: ast.Dict, frame: Frame) -> dict[Any, Any]:
        result: dict[Any, Any] = {}
        for key, item in zip(node.keys, node.values, strict=True):
            value = self.evaluate(item, frame)
            if key is None:
                found = entries(value)
                result.update({"**": value} if found is None else found)
                continue
            name = self.evaluate(key, frame)
            result[name if isinstance(name, str | int) else len(result)] = value
        return result

    def _joinedstr(self, node: ast.JoinedStr, frame: Frame) -> Any:
        parts = [self.evaluate(part, frame) for part in node.values]
        return "".join(map(str, parts)) if all(isinstance(part, str) for part in parts) else Flow()

    def _formattedvalue(self, node: ast.FormattedValue, frame: Frame) -> Any:
        value = self.evaluate(node.value, frame)
        return str(value) if isinstance(value, str | int) else Flow()

    def _lambda(self, node: ast.Lambda, frame: Frame) -> Closure:
        return Closure(node, frame)

    def _namedexpr(self, node: ast.NamedExpr, frame: Frame) -> Any:
        value = self.evaluate(node.value, frame)
        while frame.comprehends and frame.outer is not None:
            frame = frame.outer
        frame.names[node.target.id] = value
        return value

    def _yield(self, node: ast.Yield, frame: Frame) -> Any:
        frame.yielded.append(self.evaluate(node.value, frame))
        return Flow()

    def _yieldfrom(self, node: ast.YieldFrom, frame: Frame) -> Any:
        frame.yielded.extend(items_of(self.trace, self.evaluate(node.value, frame)))
        return Flow()

    def _await(self, node: ast.Await, frame: Frame) -> Any:
        return self.evaluate(node.value, frame)

    def _starred(self, node: ast.Starred, frame: Frame) -> Any:
        return self.evaluate(node.value, frame)

    def _call(self, node: ast.Call, frame: Frame) -> Any:
        return self.call_node(node, frame)

    def _listcomp(self, node: ast.ListComp | ast.GeneratorExp | ast.SetComp, frame: Frame) -> list[Any]:
        inner = Frame(frame.function, {}, frame, comprehends=True)
        return self._generate(node.elt, node.generators, inner)

    _generatorexp = _listcomp
    _setcomp = _listcomp

    def _dictcomp(self, node: ast.DictComp, frame: Frame) -> Any:
        inner = Frame(frame.function, {}, frame, comprehends=True)
        pair = ast.Tuple([node.key, node.value], ast.Load())
        pairs = self._generate(pair, node.generators, inner)
        return {key if isinstance(key, str | int) else i: value for i, (key, value) in enumerate(pairs)}

    def _generate(self, element: ast.expr, generators: list[ast.comprehension], frame: Frame) -> list[Any]:
        if not generators:
            return [self.evaluate(element, frame)]
        first, *rest = generators
        results: list[Any] = []
        source = self.evaluate(first.iter, frame)
        items = items_of(self.trace, source)
        self.trace.go_through(items)
        for item in items:
            self.assign(first.target, item, frame)
            if any(self.truth(self.evaluate(test, frame)) is False for test in first.ifs):
                continue
            results.extend(self._generate(element, rest, frame))
        return self.as_uncounted(results) if self.is_uncounted(source) else results
