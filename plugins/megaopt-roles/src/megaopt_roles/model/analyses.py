"""The analyses of all modules of a model, and what they say of parameters together."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

from torch import nn

from megaopt_core.routing import is_projection
from megaopt_roles.adapters import changed_by
from megaopt_roles.forward.analysis import Analysis
from megaopt_roles.forward.dependencies import Call
from megaopt_roles.forward.sources.module_classes import forward_of, own_methods
from megaopt_roles.forward.sources.stored_weights import stored_weight
from megaopt_roles.forward.templates import Templates
from megaopt_roles.forward.uses import Use
from megaopt_roles.model.unread import is_torchs

__all__ = ["HOLDERS", "ModelAnalyses", "Split", "holds_more"]

HOLDERS = (nn.ParameterList, nn.ParameterDict, nn.Sequential, nn.ModuleList, nn.ModuleDict)

_TABLES = (nn.Embedding, nn.EmbeddingBag)

_OF_WHAT_IS_MADE = {"indexed", "rectified", "choosing", "sharing", "weighing", "proportioning"}
"""Uses that say nothing of what a projection takes."""

type Split = tuple[int, ...] | None


class ModelAnalyses:
    """What the sources of a model say of its parameters, read once.

    Args:
        modules: every module of the model, by canonical name.
    """

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self.uses: dict[int, set[Use]] = {}
        self.splits: dict[int, Split] = {}
        self.cuts: dict[tuple[int, int], Split] = {}
        self.heads: dict[int, tuple[int, ...]] = {}
        self.gates: set[int] = set()
        self._analyses: dict[int, Analysis] = {}
        self._modules = modules
        self._templates = Templates()
        self._owners: dict[int, nn.Module] = {}
        self._kinds: dict[str, frozenset[int]] = {}
        self.changes = changed_by(modules.values())
        seen: set[int] = set()
        for module in modules.values():
            weight = stored_weight(module)
            if weight is not None and (is_projection(module) or isinstance(module, _TABLES)):
                self._owners.setdefault(id(weight), module)
            if id(module) not in seen and _worth_reading(module):
                self._add(self.analysis(module))
            seen.add(id(module))

    def _add(self, analysis: Analysis) -> None:
        """Add what one module says; of what two say, the first counts that says something."""
        for key, uses in analysis.uses.items():
            self.uses.setdefault(key, set()).update(uses)
        for key, split in analysis.splits.items():
            if not self.splits.get(key):
                self.splits[key] = split
        for key, heads in analysis.heads.items():
            self.heads.setdefault(key, heads)
        self.gates |= analysis.gates
        for axis, split in analysis.cuts.items():
            if not self.cuts.get(axis):
                self.cuts[axis] = split

    def analysis(self, module: nn.Module) -> Analysis:
        """Return what one module's forward says.

        Args:
            module: any module of the model.
        """
        known = self._analyses.get(id(module))
        if known is None:
            known = self._analyses[id(module)] = self._templates.analysis(
                module, self.changes.get(id(module))
            )
        return known

    def calls(self, module: nn.Module) -> list[Call]:
        """Return the calls of one module's forward, where that was read.

        Args:
            module: any module of the model.
        """
        known = self._analyses.get(id(module))
        return [] if known is None else known.calls

    def used_as(self, kind: str) -> frozenset[int]:
        """Return the weights that are used in one way, and the projections that own them, by identity.

        Args:
            kind: as :class:`Use` has it.
        """
        if kind not in self._kinds:
            found = {key for key, uses in self.uses.items() if any(use.kind == kind for use in uses)}
            self._kinds[kind] = frozenset(
                found | {id(self._owners[key]) for key in found & self._owners.keys()}
            )
        return self._kinds[kind]

    def takes_codes(self, module: nn.Module, weight: nn.Parameter) -> bool:
        """True for a projection that takes one-hot codes wherever it is called, and whose weight is used for no more.

        Args:
            module: the projection.
            weight: its weight.
        """
        others = {use.kind for use in self.uses.get(id(weight), ())} - _OF_WHAT_IS_MADE
        calls = [
            call
            for analysis in list(self._analyses.values())
            for call in analysis.calls
            if call.module is module
        ]
        return bool(calls) and all(call.coded for call in calls) and not others

    @cached_property
    def places(self) -> dict[int, set[tuple[int, Any]]]:
        """Where each module is called: by which module, and where in its source, by identity."""
        found: dict[int, set[tuple[int, Any]]] = {}
        for caller, analysis in list(self._analyses.items()):
            for call in analysis.calls:
                found.setdefault(id(call.module), set()).add((caller, call.site))
        return found


_own_source: dict[type, bool] = {}


def _worth_reading(module: nn.Module) -> bool:
    """True for modules that own bare parameters or projections, and are not torch's own."""
    kind = type(module)
    if kind not in _own_source:
        readable = forward_of(module) is not None or bool(own_methods(module))
        _own_source[kind] = not is_torchs(module) and readable
    if not _own_source[kind] and "forward" not in module.__dict__:
        return False
    if any(param is not None for param in module._parameters.values()):
        return True
    children = [child for child in module._modules.values() if child is not None]
    return any(
        is_projection(child)
        or isinstance(child, HOLDERS)
        or "base_layer" in child._modules
        or forward_of(child) is None  # it only holds what its parent uses
        or _is_layer_by_hand(child)
        for child in children
    )


def holds_more(module: nn.Module) -> bool:
    """True for a projection of somebody's own class that holds other matrices beside its weight: of an adapter, say."""
    if not is_projection(module) or is_torchs(module) or module._parameters.get("weight") is None:
        return False
    others = [param for name, param in module._parameters.items() if name != "weight"]
    children = [child for child in module._modules.values() if child is not None]
    others += [param for child in children for param in child.parameters()]
    return any(param is not None and param.dim() > 1 for param in others)


def _is_layer_by_hand(module: nn.Module) -> bool:
    """True for a module of somebody's own that holds a matrix: of what it returns, its parent may take parts."""
    return not is_torchs(module) and any(
        param is not None and param.dim() > 1 for param in module._parameters.values()
    )
