"""Reads the forwards of a whole model: splits of projections, uses of parameters, what ends in the output."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

from torch import nn

from megaopt_core.routing import is_projection
from megaopt_roles.adapters import changed_by
from megaopt_roles.forward.analysis import Analysis
from megaopt_roles.forward.dependencies import ARGUMENT, Call, Part, is_mark
from megaopt_roles.forward.sources.module_classes import forward_of, own_methods
from megaopt_roles.forward.sources.stored_weights import stored_weight
from megaopt_roles.forward.templates import Templates
from megaopt_roles.forward.uses import Use
from megaopt_roles.head_columns import find_head_columns
from megaopt_roles.unread import guessed_ends, is_torchs

__all__ = ["HOLDERS", "Ends", "ModelReading"]

HOLDERS = (nn.ParameterList, nn.ParameterDict, nn.Sequential, nn.ModuleList, nn.ModuleDict)

_TABLES = (nn.Embedding, nn.EmbeddingBag)

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
        self.heads: dict[int, tuple[int, ...]] = {}
        self.gates: set[int] = set()
        self._analyses: dict[int, Analysis] = {}
        self.guessed: set[int] = set()
        self._unread: set[int] = set()
        self._modules = modules
        self._ends: dict[tuple[int, int | None], Ends] = {}
        self._templates = Templates()
        self._scaling: dict[int, bool] = {}
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
            more = self.origins(self.analysis(module).returned)[0] if _holds_more(module) else frozenset()
            return more | {id(module)}, False
        base = module._modules.get("base_layer")
        if base is not None and is_projection(base):  # an adapter: the layer, and the factors beside it
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

    def is_followed(self, name: str, module: nn.Module) -> bool:
        """True for a projection that some later layer takes the output of, or that torch's own module calls.

        Args:
            name: its canonical name.
            module: the projection.
        """
        if id(module) in self.consumed and id(module) not in self._unread:
            return True
        holder: nn.Module | None = None
        while name and (holder is None or isinstance(holder, HOLDERS) or holder is module):
            name = name.rpartition(".")[0]
            holder = self._modules.get(name)
        return holder is None or holder is module or is_torchs(holder)

    def takes_codes(self, module: nn.Module, weight: nn.Parameter) -> bool:
        """True for a projection that takes one-hot codes wherever it is called, and whose weight is used for no more.

        Args:
            module: the projection.
            weight: its weight.
        """
        others = {use.kind for use in self.uses.get(id(weight), ())} - {"indexed", "rectified", "choosing"}
        calls = [
            call
            for analysis in list(self._analyses.values())
            for call in analysis.calls
            if call.module is module
        ]
        return bool(calls) and all(call.coded for call in calls) and not others

    @cached_property
    def consumed(self) -> frozenset[int]:
        """The projections, and weights used by hand, whose output a later layer takes, by identity."""
        return self._consumers[0] | self._consumers[1]

    @cached_property
    def scaled(self) -> frozenset[int]:
        """Those of them whose output nothing but norms and gains take: these may stand behind a head, too."""
        return self._consumers[1] - self._consumers[0]

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
            found |= self.origins(getattr(analysis, kind), done)[0]
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

    @cached_property
    def _consumers(self) -> tuple[frozenset[int], frozenset[int]]:
        """What layers take, and what norms and gains take."""
        found, done, seen = (set[int](), set[int]()), (set[Any](), set[Any]()), set[int]()
        for module in self._modules.values():
            if id(module) in seen or (is_torchs(module) and not module._modules):
                continue
            if is_projection(module) and not _holds_more(module):
                continue
            seen.add(id(module))
            first: dict[Any, int] = {}
            trained = {id(call.module) for call in self.analysis(module).calls if not call.cut_off}
            for call in self.analysis(module).calls:
                by_hand = isinstance(call.module, nn.Parameter)
                start = call.order if by_hand else first.setdefault((id(call.module), call.site), call.order)
                # the input aside, what is fed back in a loop, what a layer takes of itself, and what is made a second
                # time to be given: an estimate without a gradient
                fed = [
                    dep
                    for dep in call.deps
                    if not is_mark(dep)
                    and dep.module is not call.module
                    and not (_is_cut_off(dep) and id(dep.module) in trained and not call.cut_off)
                    and (dep.order < start or _stands_before(dep, call) or not _comes_from(dep, call))
                ]
                which = self._only_scales(call.module)
                found[which].update(self.origins(frozenset(fed), done[which])[0])
        return frozenset(found[0]), frozenset(found[1])

    @cached_property
    def places(self) -> dict[int, set[tuple[int, Any]]]:
        """Where each module is called: by which module, and where in its source, by identity."""
        found: dict[int, set[tuple[int, Any]]] = {}
        for caller, analysis in list(self._analyses.items()):
            for call in analysis.calls:
                found.setdefault(id(call.module), set()).add((caller, call.site))
        return found

    def _only_scales(self, module: nn.Module | nn.Parameter) -> bool:
        """True for a norm, a gain or an activation with parameters: nothing in it has more than one dimension."""
        if not isinstance(module, nn.Module):
            return False
        structure = self._templates.structure(module)
        if structure not in self._scaling:
            self._scaling[structure] = all(param.dim() < 2 for param in module.parameters())
        return self._scaling[structure]

    @cached_property
    def head_columns(self) -> dict[int, int]:
        """Columns of a head in output projections, by identity."""
        return find_head_columns(self, self._modules)

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

    def _add(self, analysis: Analysis) -> None:
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


def _is_cut_off(dep: Any) -> bool:
    return bool((dep.call if isinstance(dep, Part) else dep).cut_off)


def _stands_before(dep: Any, call: Call) -> bool:
    """True for a dependency that is made before a call in each round of a loop: the source has it further above."""
    made = dep.call if isinstance(dep, Part) else dep
    for one, other in zip(made.site, call.site, strict=False):
        if one is not other:
            ends = [(node.end_lineno or 0, node.end_col_offset or 0) for node in (one, other)]
            return ends[0] < ends[1]
    return False


def _comes_from(dep: Any, call: Call) -> bool:
    """True for a dependency that comes from an earlier round of the same call: it is fed back."""
    stack, seen = [dep], set[Any]()
    while stack:
        at = stack.pop()
        if is_mark(at) or at in seen:
            continue
        seen.add(at)
        made = at.call if isinstance(at, Part) else at
        if made.module is call.module and made.site == call.site:
            return True
        stack.extend(made.deps)
    return False


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


def _holds_more(module: nn.Module) -> bool:
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
