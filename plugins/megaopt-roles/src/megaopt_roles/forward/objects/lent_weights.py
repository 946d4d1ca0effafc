"""Modules that are called with other weights than their own: `functional_call` of a skeleton, with a dictionary."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from attrs import frozen
from torch import nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from megaopt_core.routing import is_conv1d, is_linear
from megaopt_roles.forward.operations.functions import operation
from megaopt_roles.forward.trace import Trace
from megaopt_roles.forward.values import Weight

__all__ = ["Lent", "lent_to"]


@frozen(eq=False)
class Lent:
    """Weights that a module is called with, by the identity of the module inside that has such a one, and their name.

    Args:
        weights: for each, its weights by name.
        holders: identities of all modules on the way to them.
    """

    weights: Mapping[int, Mapping[str, Weight]]
    holders: frozenset[int]

    def called(self, trace: Trace, module: nn.Module, first: Any) -> Any:
        """Return the output of one of torch's layers; None for a module whose forward is to be read.

        Args:
            trace: where uses are noted.
            module: what is called.
            first: its input.
        """
        own = self.weights.get(id(module), {})
        weight, bias = own.get("weight"), own.get("bias")
        if weight is None:
            return None
        if is_linear(module):
            return operation(trace, "linear", [first, weight, bias], {})
        if is_conv1d(module):
            return operation(trace, "addmm", [bias, first, weight], {})
        if isinstance(module, _ConvNd):
            name = f"conv{'_transpose' * isinstance(module, _ConvTransposeNd)}{len(module.kernel_size)}d"
            return operation(trace, name, [first, weight, bias], {"groups": module.groups})
        if isinstance(module, nn.Embedding | nn.EmbeddingBag):
            return operation(trace, "embedding", [first, weight], {})
        if "norm" in type(module).__name__.lower():
            trace.use_all(own.values(), "elementwise")
            return first
        return None


def lent_to(inside: Mapping[str, nn.Module], given: Any, own: Collection[int]) -> Lent | None:
    """Return what a module is lent by a dictionary; None where that cannot be told, or is nothing.

    Args:
        inside: what is called, and the modules inside, by name.
        given: the weights that it is called with, by name.
        own: identities of its own parameters: made of these, changed or not, weights are left out.
    """
    if not isinstance(given, dict):
        return None
    weights: dict[int, dict[str, Weight]] = {}
    holders: set[int] = set()
    for name, value in given.items():
        if not isinstance(value, Weight) or any(id(param) in own for param in value.params):
            continue
        path, _, attribute = str(name).rpartition(".")
        owner = inside.get(path)
        if owner is None or attribute not in owner._parameters:
            return None
        weights.setdefault(id(owner), {})[attribute] = value
        while path:
            holders.add(id(inside[path]))
            path = path.rpartition(".")[0]
    return Lent(weights, frozenset({id(inside[""]), *holders})) if weights else None
