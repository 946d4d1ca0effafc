"""Reads the forwards of a whole model: splits of projections, uses of parameters, what ends in the output."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from megaopt_core.routing import is_projection
from megaopt_roles.forward.analysis import Analysis
from megaopt_roles.forward.source import forward_of, own_methods
from megaopt_roles.forward.templates import Templates
from megaopt_roles.forward.values import ARGUMENT, Part, Use
from megaopt_roles.unread import guessed_ends, is_torchs

__all__ = ["ModelReading"]

_HOLDERS = (nn.ParameterList, nn.ParameterDict, nn.Sequential, nn.ModuleList)

type Split = tuple[int, ...] | None
type Ends = tuple[frozenset[int], bool]
"""Identities of the projections that a module's output comes from, and whether its input comes through."""


class ModelReading:
    """What the sources of a model say, read once.

    Args:
        modules: every module of the model, by canonical name.
    """

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self.uses: dict[int, set[Use]] = {}
        self.splits: dict[int, Split] = {}
        self.cuts: dict[tuple[int, int], Split] = {}
        self._analyses: dict[int, Analysis] = {}
        self.guessed: set[int] = set()
        self._modules = modules
        self._ends: dict[tuple[int, int | None], Ends] = {}
        self._templates = Templates()
        seen: set[int] = set()
        for module in modules.values():
            if id(module) not in seen and _worth_reading(module):
                self._add(self.analysis(module))
            seen.add(id(module))

    def analysis(self, module: nn.Module) -> Analysis:
        """Return what one module's forward says.

        Args:
            module: any module of the model.
        """
        known = self._analyses.get(id(module))
        if known is None:
            known = self._analyses[id(module)] = self._templates.analysis(module)
        return known

    def ends(self, module: nn.Module | nn.Parameter, item: int | None = None) -> Ends:
        """Return the projections whose output a module returns, with nothing that has parameters in between.

        Embedding tables are among them. Where a forward cannot be read they are a guess, noted in `guessed`.

        Args:
            module: a module of the model, or a weight that is used by hand.
            item: ask for this item of the tuple that the module returns.
        """
        if isinstance(module, nn.Parameter):
            return frozenset({id(module)} if module.dim() == 2 else ()), False
        if is_projection(module) or isinstance(module, nn.Bilinear | nn.Embedding | nn.EmbeddingBag):
            return frozenset({id(module)}), False
        base = module._modules.get("base_layer")
        if base is not None and is_projection(base):
            return frozenset({id(base)}), False
        if (id(module), item) not in self._ends:
            self._ends[id(module), item] = (frozenset(), False)  # what a recursion sees
            self._ends[id(module), item] = self._found_ends(module, item)
        return self._ends[id(module), item]

    def _found_ends(self, module: nn.Module, item: int | None) -> Ends:
        analysis = self.analysis(module)
        if not analysis.readable and not analysis.calls and not is_torchs(module):
            found = guessed_ends(module, self.ends)
            self.guessed |= found
            return found, False
        if forward_of(module) is None and not isinstance(module, _HOLDERS):  # a holder of several models
            found, passes = self._resolve(analysis.returned)
            parts = [self.ends(child)[0] for child in module._modules.values() if child is not None]
            others = frozenset[int]().union(*parts) - found
            self.guessed |= others
            return found | others, passes
        deps = analysis.returned
        if item is not None and item < len(analysis.parts):
            deps = analysis.parts[item]
        return self._resolve(deps)

    def is_read(self, name: str, module: nn.Module) -> bool:
        """True for a module that a forward calls which could be read, or whose caller is torch's own.

        Args:
            name: its canonical name.
            module: the module.
        """
        holder: nn.Module | None = None
        while name and (holder is None or isinstance(holder, _HOLDERS) or holder is module):
            name = name.rpartition(".")[0]
            holder = self._modules.get(name)
        if holder is None or holder is module or is_torchs(holder):
            return True
        analysis = self.analysis(holder)
        return analysis.readable or any(call.module is module for call in analysis.calls)

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
            first: dict[int, int] = {}
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
            inside, through = self.ends(dep.module, dep.index if isinstance(dep, Part) else None)
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


_own_source: dict[type, bool] = {}


def _worth_reading(module: nn.Module) -> bool:
    """True for modules that own bare parameters or projections, and are not torch's own."""
    kind = type(module)
    if kind not in _own_source:
        readable = forward_of(module) is not None or bool(own_methods(module))
        _own_source[kind] = not is_torchs(module) and readable
    if not _own_source[kind]:
        return False
    if any(param is not None for param in module._parameters.values()):
        return True
    children = [child for child in module._modules.values() if child is not None]
    return any(
        is_projection(child) or isinstance(child, _HOLDERS) or "base_layer" in child._modules
        for child in children
    )
