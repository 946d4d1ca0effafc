"""Evaluating calls of layers: projections, and modules without parameters."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from attrs import evolve
from torch import nn
from torch.nn.modules.conv import _ConvNd

from megaopt_core.routing import is_linear, stated
from megaopt_roles.forward.dependencies import ARGUMENT, NUMBER, Call
from megaopt_roles.forward.evaluation.builtin_calls import BuiltinEvaluator
from megaopt_roles.forward.objects.binding import bind
from megaopt_roles.forward.operations.functions import operation
from megaopt_roles.forward.sources.module_classes import forward_of, home_of, torchs_class
from megaopt_roles.forward.sources.stored_weights import stored_weight
from megaopt_roles.forward.trace import BATCH, PLACES, Trace
from megaopt_roles.forward.uses import Use
from megaopt_roles.forward.values import Flow, deps_of, is_abstract, weights_of
from megaopt_roles.forward.weights.forms import whole_weight

__all__ = ["DEEPEST", "LayerCallEvaluator"]

DEEPEST = 12
"""How many calls deep functions are read."""

_LOSSES_OF_CLASSES = (nn.CrossEntropyLoss, nn.NLLLoss, nn.BCELoss, nn.BCEWithLogitsLoss, nn.CTCLoss)
_BOUNDED = frozenset((nn.Sigmoid, nn.Hardsigmoid, nn.LogSigmoid, nn.Tanh, nn.Hardtanh, nn.Softsign))


class LayerCallEvaluator(BuiltinEvaluator):
    """Evaluates calls of layers.

    Args:
        trace: where everything that is seen is noted.
    """

    def __init__(self, trace: Trace) -> None:
        super().__init__(trace)
        self.running: list[Any] = []  # the modules and functions that are being read, the outermost first

    @abstractmethod
    def run(self, function: Callable[..., Any], names: dict[str, Any]) -> Any:
        """Return what the body of a plain function returns."""

    def inline(self, module: nn.Module, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Return the output of a child module by reading its forward."""
        forward = forward_of(module)
        if forward is None:
            return self.trace.unknown(args, kwargs)
        self.running.append(module)
        try:
            return self.run(forward, bind(forward, [module, *args], kwargs))
        finally:
            self.running.pop()

    def _note_codes(self, module: nn.RNNBase | nn.RNNCellBase) -> None:
        """Note that the first weights of a recurrent layer look parts of them up, by one-hot codes."""
        for name in ("weight_ih", "weight_ih_l0", "weight_ih_l0_reverse"):
            weight = module._parameters.get(name)
            if weight is not None:
                self.trace.use(whole_weight(weight), Use("indexed"))

    def _project(self, module: nn.Module, first: Any, values: Any, of: nn.Module | None = None) -> Flow:
        self.trace.use_all(weights_of(values), "elementwise")
        if isinstance(first, Flow) and first.soft and _is_expectation(module):
            return Flow(first.deps)
        call = self.trace.call(of or module, deps_of(values))
        call.blank = isinstance(first, Flow) and (first.zero or first.noise)
        weight = module._parameters.get("weight")
        if weight is not None and isinstance(first, Flow) and first.one_hot:
            self.trace.use(whole_weight(weight), Use("indexed"))
            call.coded = first.coded and (is_linear(module) or _is_pointwise(module))
        if isinstance(module, _ConvNd):
            if _keeps_channels(module) and isinstance(first, Flow) and first.piece is not None:
                return evolve(first, deps=frozenset({call}), fresh=False, call=None)
            spatial = PLACES[: len(module.kernel_size)]
            return self.trace.rows_of(module, module.out_channels, frozenset({call}), BATCH[:1], spatial)
        size = stated(module, "out_features") or stated(module, "nf")
        if size is None and weight is not None:
            size = weight.shape[0]
        if not isinstance(size, int):
            return Flow(frozenset({call}))
        return self.trace.rows_of(module, size, frozenset({call}), self.trace.leading(first))

    def _call_plain(self, module: nn.Module, first: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Return the output of a module without parameters."""
        kind = torchs_class(type(module))
        if isinstance(module, nn.GLU):
            return operation(self.trace, "glu", [first, module.dim], {})
        if isinstance(module, nn.Softmax) and is_abstract(first):
            return operation(self.trace, "softmax", [first, module.dim], {})
        if isinstance(module, nn.Identity | nn.Dropout) or home_of(kind) == "torch.nn.modules.activation":
            name = "tanh" if kind in _BOUNDED else "relu"
            name = "identity" if isinstance(module, nn.Identity | nn.Dropout) else name
            return operation(self.trace, name, [first], {}) if is_abstract(first) else first
        if home_of(kind) == "torch.nn.modules.loss":
            return self.trace.loss(*args, *kwargs.values(), classes=issubclass(kind, _LOSSES_OF_CLASSES))
        if home_of(kind) == "einops.layers.torch" and kind.__name__ == "Rearrange" and is_abstract(first):
            pattern, sizes = (self.read(module, name) for name in ("pattern", "axes_lengths"))
            return operation(self.trace, "rearrange", [first, pattern], sizes)
        if isinstance(module, nn.Flatten | nn.Unflatten) and is_abstract(first):
            name = "flatten" if isinstance(module, nn.Flatten) else "unflatten"
            return operation(self.trace, name, [first, *_shaping(module)], {})
        if home_of(kind).startswith("torchvision.ops.") and "RoI" in kind.__name__:
            return operation(self.trace, "roi_align", args, kwargs)
        if (
            forward_of(module) is not None
            and len(self.running) < DEEPEST
            and not home_of(kind).startswith("torch.")
        ):
            before = len(self.trace.calls)
            result = self.inline(module, args, kwargs)
            made = deps_of(result)
            needed = deps_of((args, kwargs)) - ({ARGUMENT} if NUMBER in made else set())
            if _with_taken(made, self.trace.calls[before:]) >= needed:
                return result
        self.trace.use_all(weights_of((args, kwargs)), "elementwise")
        return self.trace.unknown(args, kwargs)


def _is_expectation(module: nn.Module) -> bool:
    """True for a frozen projection to one feature: what it makes of a softmax is the mean of fixed values.

    YOLO's distances to the four sides of a box are such means, and the layer before is the head.
    """
    weight = stored_weight(module)
    return weight is not None and not weight.requires_grad and weight.shape[0] == 1


def _with_taken(deps: frozenset[Any], made: Sequence[Call]) -> frozenset[Any]:
    """Return dependencies, with what those of them took that were made last: weights that a module was handed."""
    for call in reversed(made):
        if call in deps:
            deps |= call.deps
    return deps


def _shaping(module: nn.Flatten | nn.Unflatten) -> list[Any]:
    """Return the arguments of the function that a layer is which shapes features."""
    if isinstance(module, nn.Flatten):
        return [module.start_dim, module.end_dim]
    return [module.dim, [size[1] if isinstance(size, tuple) else size for size in module.unflattened_size]]


def _keeps_channels(module: _ConvNd) -> bool:
    """True for a depthwise convolution with one filter a channel: each comes out as it went in, by itself."""
    return module.groups == module.in_channels == module.out_channels


def _is_pointwise(module: nn.Module) -> bool:
    """True for a convolution that takes each position by itself."""
    return isinstance(module, _ConvNd) and max(module.kernel_size) == 1 == module.groups
