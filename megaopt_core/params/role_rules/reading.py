"""Reads the forwards of a whole model: splits of projections, uses of parameters, what ends in the output."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.nn.modules.conv import _ConvNd

from megaopt_core.params.names import named_modules
from megaopt_core.params.role_rules.forward.analysis import Analysis, analyze
from megaopt_core.params.role_rules.forward.source import forward_of
from megaopt_core.params.role_rules.forward.values import ARGUMENT, Call, Use
from megaopt_core.params.role_rules.modules import is_conv1d, is_linear, is_projection

__all__ = ["ModelReading"]

type Split = tuple[int, ...] | None
type Ends = tuple[frozenset[int], bool]
"""Identities of the projections that a module's output comes from, and whether its input comes through."""


class ModelReading:
    """What the sources of a model say, read once.

    Args:
        model: the model.
    """

    def __init__(self, model: nn.Module) -> None:
        self.uses: dict[int, set[Use]] = {}
        self.splits: dict[int, Split] = {}
        self.cuts: dict[tuple[int, int], Split] = {}
        self._analyses: dict[int, Analysis] = {}
        self._ends: dict[int, Ends] = {}
        self._templates: dict[object, nn.Module] = {}
        self._keep: list[nn.Module] = [model]
        seen: set[int] = set()
        for _, module in named_modules(model):
            if id(module) not in seen and _worth_reading(module):
                self._add(self.analysis(module))
            seen.add(id(module))

    def analysis(self, module: nn.Module) -> Analysis:
        """Return what one module's forward says.

        Args:
            module: any module of the model.
        """
        if id(module) not in self._analyses:
            key = _signature(module)
            template = None if key is None else self._templates.setdefault(key, module)
            if template is None or template is module:
                self._analyses[id(module)] = analyze(module)
            else:
                self._analyses[id(module)] = _transfer(self.analysis(template), template, module)
        return self._analyses[id(module)]

    def ends(self, module: nn.Module | nn.Parameter) -> Ends:
        """Return the projections whose output a module returns, with nothing that has parameters in between.

        Args:
            module: a module of the model, or a weight that is used by hand.
        """
        if isinstance(module, nn.Parameter):
            return frozenset({id(module)} if module.dim() == 2 else ()), False
        if is_linear(module) or is_conv1d(module) or isinstance(module, _ConvNd):
            return frozenset({id(module)}), False
        base = module._modules.get("base_layer")
        if base is not None and is_projection(base):
            return frozenset({id(base)}), False
        if id(module) not in self._ends:
            self._ends[id(module)] = (frozenset(), False)  # what a recursion sees
            analysis = self.analysis(module)
            self._ends[id(module)] = self._resolve(analysis.returned)
        return self._ends[id(module)]

    def consumed(self, module: nn.Module, among: Iterable[int]) -> set[int]:
        """Return which projections a later module takes as input, anywhere inside a module.

        Args:
            module: where to look.
            among: the projections that are asked about, by identity.
        """
        wanted, found, seen = set(among), set[int](), set[int]()
        stack: list[Any] = [module]
        while stack:
            current = stack.pop()
            if isinstance(current, nn.Parameter) or id(current) in seen or is_projection(current):
                continue
            seen.add(id(current))
            analysis = self.analysis(current)
            first = {}
            for call in analysis.calls:
                first.setdefault(id(call.module), call.order)
                stack.append(call.module)
            for call in analysis.calls:
                for dep in call.deps:
                    if dep == ARGUMENT or dep.order >= first[id(call.module)]:
                        continue  # the input, or something fed back in a loop
                    found |= self._resolve(frozenset({dep}))[0] & wanted
        return found

    def _resolve(self, deps: frozenset[Any]) -> Ends:
        found: frozenset[int] = frozenset()
        passes = False
        stack, seen = list(deps), set[int]()
        while stack:
            dep = stack.pop()
            if id(dep) in seen:
                continue
            seen.add(id(dep))
            if dep == ARGUMENT:
                passes = True
                continue
            inside, through = self.ends(dep.module)
            found |= inside
            if through:
                stack.extend(dep.deps)
        return found, passes

    def _add(self, analysis: Analysis) -> None:
        for key, uses in analysis.uses.items():
            self.uses.setdefault(key, set()).update(uses)
        for key, split in analysis.splits.items():
            if not self.splits.get(key):
                self.splits[key] = split
        for axis, split in analysis.cuts.items():
            if not self.cuts.get(axis):
                self.cuts[axis] = split


def _worth_reading(module: nn.Module) -> bool:
    """True for modules that own bare parameters or projections, and are not torch's own."""
    if forward_of(module) is None or type(module).__module__.startswith(("torch.nn.modules", "torch.ao")):
        return False
    if any(param is not None for param in module._parameters.values()):
        return True
    holders = (nn.ParameterList, nn.ParameterDict, nn.Sequential, nn.ModuleList)
    return any(child is not None and (is_projection(child) or isinstance(child, holders) or "base_layer" in child._modules)
               for child in module._modules.values())  # fmt: skip


def _signature(module: nn.Module) -> object | None:
    """Return what two modules have in common whose forwards say the same; None for modules that are not compared."""
    if any(child is not None and child._modules for child in module._modules.values()):
        return None
    children = tuple(
        (name, type(child), tuple(_shape(param) for param in child._parameters.values()))
        for name, child in module._modules.items()
        if child is not None
    )
    own = tuple((name, _shape(param)) for name, param in module._parameters.items())
    settings = tuple(
        (name, value if isinstance(value, int | float | str | bool | None) else id(value))
        for name, value in module.__dict__.items()
        if not name.startswith("_") and name != "training"
    )
    key = (type(module), children, own, settings)
    return key if len(children) + len(own) > 0 else None


def _shape(param: nn.Parameter | None) -> tuple[int, ...] | None:
    return None if param is None or nn.parameter.is_lazy(param) else tuple(param.shape)


def _transfer(analysis: Analysis, template: nn.Module, module: nn.Module) -> Analysis:
    """Return an analysis of one module as that of another of the same signature."""
    twin: dict[int, Any] = {id(template): module}
    for name, child in template._modules.items():
        if child is not None:
            twin[id(child)] = module._modules[name]
            for attribute, param in child._parameters.items():
                twin[id(param)] = twin[id(child)]._parameters[attribute]
    for name, param in template._parameters.items():
        twin[id(param)] = module._parameters[name]
    calls = {call: Call(twin.get(id(call.module), call.module), frozenset(), call.order) for call in analysis.calls}

    def moved(deps: frozenset[Any]) -> frozenset[Any]:
        return frozenset(calls.get(dep, dep) for dep in deps)

    for call, copy in calls.items():
        copy.deps = moved(call.deps)
    return Analysis(
        list(calls.values()),
        moved(analysis.returned),
        {id(twin[key]): uses for key, uses in analysis.uses.items() if key in twin},
        {id(twin[key]): split for key, split in analysis.splits.items() if key in twin},
        {(id(twin[key]), axis): split for (key, axis), split in analysis.cuts.items() if key in twin},
        analysis.readable,
    )
