"""Evaluating calls of child modules: those that are read on the spot, and all others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Final

import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd

from megaopt_core.routing import is_conv1d, is_linear, stated
from megaopt_roles.forward.dependencies import ARGUMENT
from megaopt_roles.forward.evaluation.layer_calls import DEEPEST, LayerCallEvaluator
from megaopt_roles.forward.objects.binding import bind
from megaopt_roles.forward.objects.handed import are_cut, puts_more, without_rows
from megaopt_roles.forward.objects.lent_weights import Lent
from megaopt_roles.forward.sources.hooks import hooked_inside, readable_hooks
from megaopt_roles.forward.sources.module_classes import adapted_layer, forward_of, home_of, torchs_class
from megaopt_roles.forward.sources.trees import function_tree
from megaopt_roles.forward.trace import Trace
from megaopt_roles.forward.values import Flow, Weight, deps_of, weights_of

__all__ = ["ModuleCallEvaluator"]

_WORTH_OF_HANDED: Final = 3_000
"""Steps that a module is worth for what it takes apart of what it is handed."""
_ENOUGH_ALIKE: Final = 8
"""Layers of one class that are read for the weights which they are handed."""


class ModuleCallEvaluator(LayerCallEvaluator):
    """Evaluates calls of child modules.

    Args:
        trace: where everything that is seen is noted.
    """

    def __init__(self, trace: Trace) -> None:
        super().__init__(trace)
        self.hooked: dict[int, list[nn.Module]] = {}  # what inside of modules has hooks after its forward
        self.handed: set[Any] = set()  # what modules were read for, by their class and its rows
        self.lent: list[Lent] = []  # weights that modules which are being read were lent, the outermost first
        self.takers: Counter[Any] = Counter()  # read for weights that they were handed, by class and these

    def call_module(self, module: nn.Module, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Return the output of a child module, after its hooks have seen it."""
        return self._after(module, args, kwargs, self._call_child(module, args, kwargs))

    def _after(self, module: nn.Module, args: Sequence[Any], kwargs: dict[str, Any], made: Any) -> Any:
        """Return what hooks make of the output of a module; they may keep it elsewhere."""
        for hook, with_kwargs in readable_hooks(module) if module._forward_hooks else ():
            given = [module, list(args), kwargs] if with_kwargs else [module, list(args)]
            changed = self.call(hook, [*given, made], {})
            made = made if changed is None else changed
        return made

    def _after_inside(self, module: nn.Module, values: tuple[list[Any], dict[str, Any]]) -> None:
        """Let hooks inside of a module, whose forward is read by itself, see the outputs that they are called after."""
        if id(module) not in self.hooked:
            self.hooked[id(module)] = hooked_inside(module)
        for part in self.hooked[id(module)]:
            call = self.trace.call(part, frozenset())  # of what, the forward that is read by itself says
            self._after(part, *values, made=Flow(frozenset({call}), call=call))

    def _call_child(self, module: nn.Module, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        first = args[0] if args else next(iter(kwargs.values()), Flow())
        width = _width_taken(module)
        self.trace.expect(first, width)
        if width is None:
            self.trace.share(module, first)
        if isinstance(module, nn.Sequential) and forward_of(module) is nn.Sequential.forward:
            for child in module._modules.values():
                if child is None:
                    continue
                first = self.call_module(child, [first], {})
            return first
        lent = next((lent for lent in reversed(self.lent) if id(module) in lent.holders), None)
        if lent is not None:
            made = lent.called(self.trace, module, first)
            return self.inline(module, args, kwargs) if made is None else made
        return self._call_own(module, first, args, kwargs)

    def _call_own(self, module: nn.Module, first: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Return the output of a child module with the weights that it has."""
        values = (list(args), kwargs)
        if is_linear(module) or is_conv1d(module) or isinstance(module, _ConvNd):
            return self._project(module, first, values)
        if not _has_params(module):
            return self._call_plain(module, first, args, kwargs)
        if isinstance(module, nn.RNNBase | nn.RNNCellBase) and isinstance(first, Flow) and first.one_hot:
            self._note_codes(module)
        base = adapted_layer(module)
        if base is not None and is_linear(base):
            return self._project(base, first, values, of=module)
        handed = weights_of(values)
        taker = (type(module), frozenset(id(weight.base) for weight in handed))
        if handed and self.takers[taker] == _ENOUGH_ALIKE:
            handed = []  # what layers of this class do with it is known
        if self._worth_inlining(module, args, kwargs, handed):
            self.takers[taker] += 1
            return self.inline(module, args, kwargs)
        self._read_handed(module, args, kwargs)
        self.trace.use_all(handed, "elementwise")
        call = self.trace.call(module, deps_of(values))
        call.blank = isinstance(first, Flow) and (first.zero or first.noise)
        self._after_inside(module, values)
        norm = isinstance(module, nn.LayerNorm | nn.GroupNorm | nn.RMSNorm) or "Norm" in type(module).__name__
        if norm and isinstance(first, Flow) and first.tensor is not None:  # its rows are those of its input
            return Flow(frozenset({call}), first.tensor, first.piece, mixed=first.mixed, terms=first.terms)
        if isinstance(module, nn.Embedding) and ARGUMENT in deps_of(first):
            shape = (*self.trace.leading(None), module.embedding_dim)
            return Flow(frozenset({call}), torch.empty(shape, device="meta"), call=call)
        return Flow(frozenset({call}), call=call)

    def call_with(self, module: nn.Module, lent: Lent, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Return the output of a module that is called with other weights than its own."""
        lent_now = {
            (owner, name): weight for owner, own in lent.weights.items() for name, weight in own.items()
        }
        before = self.assigned
        self.assigned = {**before, **lent_now}
        self.lent.append(lent)
        try:
            return self.call_module(module, args, kwargs)
        finally:
            self.lent.pop()
            self.assigned = before

    def _read_handed(self, module: nn.Module, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """Read a module for what it takes apart of what it is handed; all else that it does is read by itself."""
        forward = forward_of(module)
        if forward is None or not self._readable(module, forward):
            return
        names = bind(forward, [module, *args], kwargs)
        cut = are_cut(module, forward, names)
        alike = {(type(module), *item) for item in cut}
        if alike <= self.handed:
            return
        self.handed |= alike
        budget = min(_WORTH_OF_HANDED, self.trace.budget)
        trace = Trace(rank=self.trace.rank, budget=budget, takers=self.trace.takers)
        reader = type(self)(trace)
        reader.assigned, reader.handed = {**self.assigned}, self.handed
        reader.running = [*self.running, module]
        cuts = {name for name, _ in cut}
        given = {name: value if name in cuts else without_rows(value) for name, value in names.items()}
        with suppress(Exception):  # a source may do anything
            reader.run(forward, given)
        self.trace.budget -= budget - max(trace.budget, 0)
        self.trace.reads += trace.reads
        self.trace.misfits |= trace.wrong

    def _readable(self, module: nn.Module, forward: Callable[..., Any]) -> bool:
        """True for a module of somebody's own whose source is there, and which is not being read."""
        of_torch = home_of(torchs_class(type(module))).startswith("torch.")
        if of_torch or len(self.running) > DEEPEST or function_tree(forward) is None:
            return False
        return not any(module is other for other in self.running)

    def _worth_inlining(
        self, module: nn.Module, args: Sequence[Any], kwargs: dict[str, Any], handed: Sequence[Weight]
    ) -> bool:
        """True for a small module, for one that is handed weights, and for a stage that puts more into a dictionary."""
        forward = forward_of(module)
        if forward is None or not self._readable(module, forward):
            return False
        small = len(module._modules) <= 4 and not any(
            child._modules for child in module._modules.values() if child
        )
        return bool(handed) or small or puts_more(forward, bind(forward, [module, *args], kwargs))


def _width_taken(module: nn.Module) -> int | None:
    """Return the features that a layer of torch's takes in its last axis; None where that is not known."""
    if isinstance(module, nn.Linear):
        return stated(module, "in_features")
    return stated(module, "input_size") if isinstance(module, nn.RNNBase | nn.RNNCellBase) else None


def _has_params(module: nn.Module) -> bool:
    if module._parameters and any(param is not None for param in module._parameters.values()):
        return True
    return any(_has_params(child) for child in module._modules.values() if child is not None)
