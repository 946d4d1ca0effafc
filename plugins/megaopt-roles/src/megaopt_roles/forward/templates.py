"""Layers that repeat are read once: what one says, its twins say too."""

from __future__ import annotations

from typing import Any, Final

from attrs import evolve
from torch import nn

from megaopt_roles.forward.analysis import Analysis, analyze
from megaopt_roles.forward.dependencies import Part
from megaopt_roles.forward.sources import quiet

__all__ = ["Templates"]

type Reads = dict[str, list[tuple[str, Any]]]
"""Attributes with their values, by the path of a module inside a layer."""

_MISSING = object()
_DEEPEST: Final = 3
"""Objects inside of objects that are compared: what calls a layer holds, with its settings."""


class Templates:
    """Analyses by the structure of modules.

    Two modules are twins when their trees have the same classes and shapes, and the plain attributes that the
    analysis of one has read have the same values in the other: plain ones, or objects of one class with the same
    attributes, as the processors that layers of attention are given.
    """

    def __init__(self) -> None:
        self._structures: dict[int, int] = {}
        self._numbers: dict[object, int] = {}
        self._known: dict[int, list[tuple[nn.Module, Analysis, Reads]]] = {}

    def analysis(self, module: nn.Module, changes: nn.Parameter | None = None) -> Analysis:
        """Return what the forward of a module says.

        Args:
            module: any module.
            changes: the weight that it is given, where it is a parametrization.
        """
        known = self._known.setdefault(self.structure(module), [])
        for template, analysis, agreed in known:
            if _agree(module, agreed):
                return _transfer(analysis, template, module)
        analysis = analyze(module, changes=changes)
        paths = {id(part): path for path, part in module.named_modules()} if analysis.reads else {}
        reads: Reads = {}
        for owner, name, value in analysis.reads:
            if id(owner) in paths:
                reads.setdefault(paths[id(owner)], []).append((name, value))
        known.append((module, analysis, reads))
        return analysis

    def structure(self, module: nn.Module) -> int:
        """Return a number that modules of the same classes and shapes share.

        Args:
            module: any module.
        """
        if id(module) not in self._structures:
            self._structures[id(module)] = -1  # what a child that holds its parent sees
            own = tuple([(name, _shape(param)) for name, param in module._parameters.items()])
            children = tuple(
                [
                    (name, 0 if child is None else self.structure(child))
                    for name, child in module._modules.items()
                ]
            )
            patched = module.__dict__.get("forward")
            hooks = tuple([getattr(hook, "__code__", type(hook)) for hook in module._forward_hooks.values()])
            key = (type(module), getattr(patched, "__func__", patched), own, children, hooks)
            self._structures[id(module)] = self._numbers.setdefault(key, len(self._numbers))
        return self._structures[id(module)]


def _shape(param: nn.Parameter | None) -> tuple[int, ...] | None:
    return None if param is None or nn.parameter.is_lazy(param) else tuple(param.shape)


def _agree(module: nn.Module, reads: Reads) -> bool:
    for path, attributes in reads.items():
        own = module.get_submodule(path).__dict__
        if not all(_is_same(own.get(name, _MISSING), value) for name, value in attributes):
            return False
    return True


def _is_same(other: Any, value: Any, depth: int = 0) -> bool:
    """True for equal numbers and strings, and for objects of one class whose attributes are the same."""
    if other is value:
        return True
    if type(other) is not type(value) or depth > _DEEPEST:
        return False
    if isinstance(value, int | float | str | tuple | list):
        return quiet.is_plain(other) and quiet.is_plain(value) and bool(other == value)
    first, second = quiet.own_attributes(other), quiet.own_attributes(value)
    if first is None or second is None or first.keys() != second.keys():
        return False
    return all(_is_same(first[name], part, depth + 1) for name, part in second.items())


def _transfer(analysis: Analysis, template: nn.Module, module: nn.Module) -> Analysis:
    """Return an analysis of one module as that of its twin."""
    twin = _twins(template, module)
    if not (analysis.calls or analysis.uses or analysis.splits or analysis.cuts or analysis.returned):
        return analysis
    calls = {
        call: evolve(call, module=twin.get(id(call.module), call.module), deps=frozenset())
        for call in analysis.calls
    }

    def moved(deps: frozenset[Any]) -> frozenset[Any]:
        return frozenset(
            Part(calls[dep.call], dep.index) if isinstance(dep, Part) else calls.get(dep, dep) for dep in deps
        )

    for call, copy in calls.items():
        copy.deps = moved(call.deps)
    return Analysis(
        list(calls.values()),
        moved(analysis.returned),
        tuple(moved(part) for part in analysis.parts),
        tuple(moved(part) for part in analysis.held),
        {id(twin[key]): uses for key, uses in analysis.uses.items() if key in twin},
        {id(twin[key]): split for key, split in analysis.splits.items() if key in twin},
        {(id(twin[key]), axis): split for (key, axis), split in analysis.cuts.items() if key in twin},
        {id(twin[key]): heads for key, heads in analysis.heads.items() if key in twin},
        {id(twin[key]) for key in analysis.gates if key in twin},
        moved(analysis.compared),
        moved(analysis.unit),
        moved(analysis.scored),
        moved(analysis.against),
        analysis.readable,
    )


def _twins(template: nn.Module, module: nn.Module) -> dict[int, Any]:
    """Return the counterpart of every module and parameter of a tree, by identity."""
    found: dict[int, Any] = {}
    stack = [(template, module)]
    while stack:
        first, second = stack.pop()
        if id(first) in found:
            continue
        found[id(first)] = second
        for param, twin in zip(first._parameters.values(), second._parameters.values(), strict=True):
            if param is not None:
                found[id(param)] = twin
        if first._modules:
            children = zip(first._modules.values(), second._modules.values(), strict=True)
            stack.extend(
                (child, other) for child, other in children if child is not None and other is not None
            )
    return found
