"""Evaluating indices, and assigning to names, attributes and items."""

from __future__ import annotations

import ast
import operator
from typing import Any

from torch import nn

from megaopt_roles.forward.evaluation.attributes import AttributeEvaluator
from megaopt_roles.forward.objects.alternatives import Choice, abstract, one_of
from megaopt_roles.forward.objects.attributes import operator_of
from megaopt_roles.forward.objects.frames import Frame
from megaopt_roles.forward.objects.unpacking import unpack
from megaopt_roles.forward.shapes import indexing
from megaopt_roles.forward.sources import quiet
from megaopt_roles.forward.values import Flow, Weight, deps_of, is_abstract

__all__ = ["ItemEvaluator"]

_EXTENTS = frozenset(["shape", "size", "numel", "nelement", "dim", "ndim", "dtype", "device", "element_size"])
"""What a tensor is asked for without its numbers."""

_STACKS = (nn.ModuleList, nn.Sequential, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


def _item(found: Any) -> Any:
    """Return an item in the form that the evaluator computes with; a list stays that list: more may be put into it."""
    if type(found) is list and any(abstract(part) is not part for part in found):
        return [*map(abstract, found)]
    return abstract(found)


def _with_item(container: Flow | list[Any], key: Any, value: Any) -> Flow:
    """Return what becomes of something where an item is put into it, at a place that is known or not."""
    deps = deps_of((container, value))
    if not (isinstance(container, Flow) and indexing.is_place(key)):
        return Flow(deps)
    before, items = container.changed or (container, {})
    return Flow(deps, changed=(before, {**items, key: value}))


class ItemEvaluator(AttributeEvaluator):
    """Evaluates indices, and assigns values."""

    def _subscript(self, node: ast.Subscript, frame: Frame) -> Any:
        value, key = self.evaluate(node.value, frame), self._key(node.slice, frame)
        found = self.item(value, key)
        self.trace.take(id(node), value, key, found)
        return found

    def _attribute(self, node: ast.Attribute, frame: Frame) -> Any:
        """Return an attribute; how large a part of a weight is says nothing of how the weight is used."""
        if node.attr not in _EXTENTS or not isinstance(node.value, ast.Subscript):
            return super()._attribute(node, frame)
        owner, key = self.evaluate(node.value.value, frame), self._key(node.value.slice, frame)
        before, self.trace.muted = self.trace.muted, isinstance(owner, Weight) or self.trace.muted
        try:
            part = self.item(owner, key)
        finally:
            self.trace.muted = before
        return self.read(part, node.attr)

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
        own = operator_of(value, "__getitem__")
        return self._item_of_pythons(value, key) if own is None else self.call(own, [key], {})

    def _item_of_pythons(self, value: Any, key: Any) -> Any:
        """Return an item of a container of Python's or of torch's."""
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
            return _item((held if isinstance(value, nn.Module) else value)[key])
        except Exception:  # noqa: BLE001 - any container, any key
            return one_of(list(value.values()) if isinstance(value, dict) else held) or Flow()

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
            frame.names[target.value.id] = _with_item(container, key, value)
