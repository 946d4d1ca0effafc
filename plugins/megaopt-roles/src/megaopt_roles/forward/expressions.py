"""Evaluating expressions."""

from __future__ import annotations

import ast
import operator
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, Final

from attrs import evolve
from torch import nn

from megaopt_roles.forward.objects.alternatives import Choice, abstract, one_of
from megaopt_roles.forward.objects.attributes import Bound, Property, attribute_of
from megaopt_roles.forward.objects.containers import entries, items_of
from megaopt_roles.forward.objects.frames import Closure, Frame
from megaopt_roles.forward.objects.unpacking import unpack
from megaopt_roles.forward.operations.functions import is_known
from megaopt_roles.forward.operators import OperatorEvaluator
from megaopt_roles.forward.shapes import indexing, moves
from megaopt_roles.forward.sources import quiet
from megaopt_roles.forward.sources.trees import global_of
from megaopt_roles.forward.trace import BudgetExceededError
from megaopt_roles.forward.values import Flow, Weight, deps_of, is_abstract
from megaopt_roles.forward.weights.noise import is_refilled

__all__ = ["Closure", "ExpressionEvaluator", "Frame"]

_WORTH_OF_A_PROPERTY: Final = 1_000
"""Steps: a model has 20 times as many."""
_STACKS = (nn.ModuleList, nn.Sequential, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


_method_names: dict[type, str] = {}


def _method_of(kind: type) -> str:
    """Return the name of the method that evaluates a kind of expression."""
    return _method_names.get(kind) or _method_names.setdefault(kind, f"_{kind.__name__.lower()}")


def _indexable(value: Any, held: list[Any]) -> Any:
    """Return what stands for a container when one item, or a slice, of it is asked for."""
    return held if isinstance(value, nn.Module) else value


def _item(found: Any) -> Any:
    """Return an item in the form that the evaluator computes with; a list stays that list: more may be put into it."""
    if type(found) is list and any(abstract(part) is not part for part in found):
        return [*map(abstract, found)]
    return abstract(found)


class ExpressionEvaluator(OperatorEvaluator):
    """Evaluates expressions; calls are left to the subclass.

    Args:
        trace: where everything that is seen is noted.
    """

    @abstractmethod
    def call(self, callee: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Return the result of a call."""

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

    def read(self, owner: Any, name: str) -> Any:
        """Return an attribute of a value."""
        if (id(owner), name) in self.assigned:
            return self.assigned[id(owner), name]
        if is_abstract(owner):
            return self._read_abstract(owner, name)
        self.trace.note_read(owner, name)
        value = attribute_of(owner, name)
        if isinstance(value, Flow) and isinstance(owner, nn.Module) and is_refilled(owner, name):
            return evolve(value, noise=True)
        if isinstance(value, Property):
            return self._property(Bound(value.owner, value.function, name))
        if isinstance(value, list | dict | set | tuple) and not isinstance(owner, list | dict | set):
            value = self._own(owner, name, value)
        return value

    def _property(self, getter: Bound) -> Any:
        """Return the value of a property; one that looks through a whole model, for its dtype, is not known."""
        kept = self.trace.reserve(_WORTH_OF_A_PROPERTY)
        try:
            return self.call(getter, (), {})
        except BudgetExceededError:
            if not kept:
                raise
            return Flow()
        finally:
            self.trace.budget += kept

    def _own(self, owner: Any, name: str, value: Any) -> Any:
        """Return a copy of a container that something holds, the same copy every time."""
        key = (id(owner), name)
        if key not in self.assigned:
            self.assigned[key] = quiet.plain_copy(value)
            self.kept.append(owner)
        return self.assigned[key]

    def _read_abstract(self, owner: Flow | Weight, name: str) -> Any:
        if name in ("shape", "dtype", "device", "ndim", "requires_grad", "is_cuda"):
            shape = (
                owner.shape
                if isinstance(owner, Weight)
                else (None if owner.tensor is None else owner.tensor.shape)
            )
            if shape is None or name not in ("shape", "ndim"):
                return Flow()
            return tuple(shape) if name == "shape" else len(shape)
        if name in ("T", "mT", "H", "mH"):
            rank = len(owner.shape or ()) if isinstance(owner, Weight) else getattr(owner.tensor, "ndim", 0)
            if rank < 2:
                return owner
            swap = (-2, -1) if rank > 2 else (0, 1)
            return moves.move(self.trace, "transpose", (owner, *swap), {})
        if name in ("data", "weight", "real"):
            return owner
        unknown = (
            isinstance(owner, Flow)
            and owner.deps
            and not owner.fresh
            and not (owner.one_hot or owner.length)
            and owner.tensor is None
            and not (owner.factors and owner.picked)
        )
        if unknown and not is_known(name):
            return Flow(deps_of(owner))
        return Bound(owner, None, name)

    def _constant(self, node: ast.Constant, frame: Frame) -> Any:
        return node.value

    def _name(self, node: ast.Name, frame: Frame) -> Any:
        scope: Frame | None = frame
        while scope is not None:
            if node.id in scope.names:
                return scope.names[node.id]
            scope = scope.outer
        found, value = global_of(frame.function, node.id)
        if found and isinstance(value, list | dict | set):
            return self._own(value, node.id, value)
        return abstract(value) if found else Flow()

    def _attribute(self, node: ast.Attribute, frame: Frame) -> Any:
        return self.read(self.evaluate(node.value, frame), node.attr)

    def _tuple(self, node: ast.Tuple | ast.List, frame: Frame) -> list[Any]:
        return self._elements(node.elts, frame)

    _list = _tuple

    def _elements(self, nodes: Sequence[ast.expr], frame: Frame) -> list[Any]:
        values: list[Any] = []
        for node in nodes:
            if isinstance(node, ast.Starred):
                value = self.evaluate(node.value, frame)
                held = quiet.items(value) if isinstance(value, list | tuple | nn.Module) else None
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

    def _subscript(self, node: ast.Subscript, frame: Frame) -> Any:
        value, key = self.evaluate(node.value, frame), self._key(node.slice, frame)
        found = self.item(value, key)
        self.trace.take(id(node), value, key, found)
        return found

    def _key(self, node: ast.expr, frame: Frame) -> Any:
        value = self.evaluate(node, frame)
        return tuple(value) if isinstance(node, ast.Tuple) else value

    def _slice(self, node: ast.Slice, frame: Frame) -> Any:
        parts = [self.evaluate(part, frame) for part in (node.lower, node.upper, node.step)]
        return slice(*parts)

    def item(self, value: Any, key: Any) -> Any:
        """Return `value[key]`."""
        if is_abstract(value):
            return indexing.index(self.trace, value, key)
        if isinstance(value, Choice):
            return one_of([self.item(module, key) for module in value.modules])
        if isinstance(value, _STACKS) and is_abstract(key):
            children = list(value.values() if isinstance(value, nn.ModuleDict | nn.ParameterDict) else value)
            return one_of(children) if children else Flow()
        held = quiet.items(value)
        if (
            held is not None
            and isinstance(key, slice)
            and any(map(is_abstract, (key.start, key.stop, key.step)))
        ):
            return [*map(abstract, held)]  # which of them is not known: it may be any
        if isinstance(value, nn.Sequential) and isinstance(key, slice) and held is not None:
            return nn.Sequential(*held[key])  # of the same layers
        if held is None or not (quiet.is_plain(key) or isinstance(value, dict)):
            return Flow()
        if isinstance(value, nn.ModuleDict):
            return value._modules.get(key) or Flow()
        if isinstance(value, nn.ParameterDict):
            return abstract(value._parameters[key]) if key in value._parameters else Flow()
        try:
            return _item((value if isinstance(value, dict) else _indexable(value, held))[key])
        except Exception:  # noqa: BLE001 - any container, any key
            return self._either(list(value.values())) if isinstance(value, dict) else self._either(held)

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
        if self.is_uncounted(source):
            self.uncounted[id(results)] = results
        return results

    def assign(self, target: ast.expr, value: Any, frame: Frame) -> None:
        """Assign a value to names, attributes and items."""
        if isinstance(target, ast.Name):
            frame.names[target.id] = value
        elif isinstance(target, ast.Tuple | ast.List):
            starred = next((i for i, part in enumerate(target.elts) if isinstance(part, ast.Starred)), None)
            unsure = starred is not None and id(value) in self.uncounted
            several = self.trace.unknown(value) if unsure else value
            parts = unpack(self.trace, several, len(target.elts), starred)
            for part, item in zip(target.elts, parts, strict=True):
                self.assign(part.value if isinstance(part, ast.Starred) else part, item, frame)
        elif isinstance(target, ast.Attribute):
            self.assigned[id(self.evaluate(target.value, frame)), target.attr] = value
        elif isinstance(target, ast.Subscript):
            self._assign_item(target, value, frame)

    def _assign_item(self, target: ast.Subscript, value: Any, frame: Frame) -> None:
        container, key = self.evaluate(target.value, frame), self._key(target.slice, frame)
        inside = (
            isinstance(key, int) and isinstance(container, list) and -len(container) <= key < len(container)
        )
        if inside or (isinstance(container, dict) and isinstance(key, str | int)):
            operator.setitem(container, key, value)
        elif isinstance(target.value, ast.Name) and isinstance(container, Flow | list):
            frame.names[target.value.id] = Flow(deps_of((container, value)))
