"""Evaluating names and attributes."""

from __future__ import annotations

import ast
from typing import Any, Final

import torch
from attrs import evolve
from torch import nn

from megaopt_roles.forward.dependencies import guessed
from megaopt_roles.forward.evaluation.operators import OperatorEvaluator
from megaopt_roles.forward.objects.alternatives import abstract
from megaopt_roles.forward.objects.attributes import Bound, Property, attribute_of
from megaopt_roles.forward.objects.frames import Frame
from megaopt_roles.forward.operations.functions import is_known, operation
from megaopt_roles.forward.operations.names import TOTALS
from megaopt_roles.forward.sources import quiet
from megaopt_roles.forward.sources.trees import global_of
from megaopt_roles.forward.trace import BudgetExceededError
from megaopt_roles.forward.values import Flow, Weight, is_abstract, shape_of
from megaopt_roles.forward.weights.noise import is_refilled

__all__ = ["AttributeEvaluator"]

_WORTH_OF_A_PROPERTY: Final = 1_000
"""Steps: a model has 20 times as many."""


class AttributeEvaluator(OperatorEvaluator):
    """Evaluates names and attributes; calls of what is behind a property are left to the subclass."""

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
            shape = shape_of(owner)
            if shape is None or name not in ("shape", "ndim"):
                return Flow()
            return shape if name == "shape" else len(shape)
        if name in ("T", "mT", "H", "mH"):
            rank = len(shape_of(owner) or ())
            if rank < 2:
                return owner
            swap = (-2, -1) if rank > 2 else (0, 1)
            return operation(self.trace, "transpose", [owner, *swap], {})
        if name in ("data", "weight", "real"):
            return owner
        if (
            isinstance(owner, Flow)
            and owner.deps
            and not owner.fresh
            and not (owner.one_hot or owner.length)
            and owner.tensor is None
            and not (owner.factors and owner.picked)
            and not is_known(name)
        ):
            made = Flow(owner.deps if hasattr(torch.Tensor, name) else guessed(owner.deps))
            return Bound(evolve(made, shares=owner.shares), None, name) if name in TOTALS else made
        return Bound(owner, None, name)

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
