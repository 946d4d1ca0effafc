"""The projections that values of a model come from."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

from torch import nn

from megaopt_core.routing import is_projection
from megaopt_roles.forward.dependencies import ARGUMENT, Part, call_behind, is_mark
from megaopt_roles.forward.sources.module_classes import adapted_layer, forward_of
from megaopt_roles.model.analyses import HOLDERS, ModelAnalyses, holds_more
from megaopt_roles.model.unread import guessed_ends, is_torchs

__all__ = ["Ends", "ModelEnds"]

type Ends = tuple[frozenset[int], bool]
"""Identities of the projections that a module's output comes from, and whether its input comes through."""


class ModelEnds(ModelAnalyses):
    """What the sources of a model say of where its values come from.

    Args:
        modules: every module of the model, by canonical name.
    """

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        super().__init__(modules)
        self.guessed: set[int] = set()
        self._unread: set[int] = set()
        self._ends: dict[tuple[int, int | None], Ends] = {}

    def ends(self, module: nn.Module | nn.Parameter, item: int | None = None) -> Ends:
        """Return the projections whose output a module returns, with nothing that has parameters in between.

        Embedding tables are among them. Where a forward cannot be read they are a guess, noted in `guessed`.

        Args:
            module: a module of the model, or a weight that is used by hand.
            item: ask for this item of the tuple that the module returns.
        """
        if isinstance(module, nn.Parameter):  # of a module that is not called, or of none
            return frozenset({id(self._owners.get(id(module), module))}), False
        if is_projection(module) or isinstance(module, nn.Bilinear | nn.Embedding | nn.EmbeddingBag):
            more = self.origins(self.analysis(module).returned)[0] if holds_more(module) else frozenset()
            return more | {id(module)}, False
        if isinstance(module, nn.RNNBase | nn.RNNCellBase):  # a layer whose weights no projection owns
            return frozenset(), False
        base = adapted_layer(module)
        if base is not None and is_projection(base):  # the layer, and the factors beside it
            return frozenset(id(part) for part in module.modules() if is_projection(part)), False
        if (id(module), item) not in self._ends:
            self._ends[id(module), item] = (frozenset(), False)  # what a recursion sees
            self._ends[id(module), item] = self._found_ends(module, item)
        return self._ends[id(module), item]

    def _found_ends(self, module: nn.Module, item: int | None) -> Ends:
        analysis = self.analysis(module)
        if not analysis.readable and not analysis.calls and not is_torchs(module):
            found = guessed_ends(module, self.ends)
            self.guessed |= found
            self._unread |= found
            return found, False
        if forward_of(module) is None and not isinstance(module, HOLDERS):  # a holder of several models
            found, passes = self.origins(analysis.returned)
            parts = [self.ends(child)[0] for child in module._modules.values() if child is not None]
            others = frozenset[int]().union(*parts) - found
            self.guessed |= others
            return found | others, passes
        deps = analysis.returned
        if item is not None and item < len(analysis.parts):
            deps = analysis.parts[item]
        return self.origins(deps)

    def origins(self, deps: frozenset[Any], done: set[Any] | None = None) -> Ends:
        """Return what dependencies come from, and whether the input comes through.

        Args:
            deps: calls, parts of what they returned, or the input.
            done: those that were followed before: they are passed over, and the others are added.
        """
        found: frozenset[int] = frozenset()
        passes = False
        stack, seen = list(deps), set[Any]() if done is None else done
        while stack:
            dep = stack.pop()
            if dep in seen:
                continue
            seen.add(dep)
            if is_mark(dep):
                passes |= dep == ARGUMENT
                continue
            inside, through = self.ends(dep.module, dep.index if isinstance(dep, Part) else None)
            found |= inside
            if through:
                stack.extend(dep.deps)
        return found, passes

    @cached_property
    def compared(self) -> frozenset[int]:
        """The projections whose output is compared with that of another layer, by a product that sums, by identity."""
        return self._origins_of("compared")

    @cached_property
    def unit(self) -> frozenset[int]:
        """The projections whose output is divided by its length: its direction is what they make, by identity."""
        return self._origins_of("unit")

    def _origins_of(self, kind: str) -> frozenset[int]:
        found, done = frozenset[int](), set[Any]()
        for analysis in list(self._analyses.values()):
            noted = getattr(analysis, kind)
            found |= self.origins(
                frozenset(dep for dep in noted if is_mark(dep) or not call_behind(dep).slope), done
            )[0]
        return found

    @cached_property
    def scored(self) -> frozenset[int]:
        """The projections whose output, by itself, a loss of classes takes, by identity."""
        return self._by_itself("scored")

    @cached_property
    def against(self) -> frozenset[int]:
        """The projections whose output, by itself, an error holds against that of other layers, by identity."""
        return self._by_itself("against")

    def _by_itself(self, kind: str) -> frozenset[int]:
        """Return the projections that alone made what the analyses note of one kind, by identity."""
        return frozenset(
            next(iter(found))
            for analysis in list(self._analyses.values())
            for dep in getattr(analysis, kind)
            for found, _ in (self.origins(frozenset({dep})),)
            if len(found) == 1
        )
