"""The one entry: a decision for every parameter of a model."""

from __future__ import annotations

from typing import Any

from attrs import evolve
from torch import nn

from megaopt_core.params import Doubt, NamedParam, Role, RoleDecision, named_params, unwrap
from megaopt_roles.conventions import Conventions
from megaopt_roles.libraries import own_batch, told_by_libraries
from megaopt_roles.module_types import by_type, layer_view
from megaopt_roles.places import target_of, tied_role
from megaopt_roles.structure import Structure, is_a, is_layer
from megaopt_roles.torch_modules import by_shape
from megaopt_roles.verdicts import verdict, with_view
from megaopt_roles.watch import Notes, watch

__all__ = ["read_roles"]

_MARKS = ("is_embedding_or_output_parameter", "is_embedding_parameter")


def read_roles(model: nn.Module, example: Any = None, *, no_forward: str = "") -> dict[str, RoleDecision]:
    """Find what every parameter of a model is.

    Module types and tying decide, and getters of transformers and timm. What these leave open is decided by one forward
    that is watched, where there is a batch, else by conventions. What is said explicitly, by attributes or registered
    views, is the core's business.

    Args:
        model: any module, on any device (meta too), wrapped or not.
        example: a batch to run one forward with: a tensor, a tuple of arguments or a mapping of keyword arguments;
            None: that of transformers' `dummy_inputs`, timm's `pretrained_cfg` or Lightning's
            `example_input_array`, where something is in doubt.
        no_forward: why no forward may be run, though there is a batch; empty: one may.

    Returns:
        A decision for every parameter, frozen ones included, by canonical name, in registration order.

    Example:
        >>> import torch
        >>> model = torch.nn.Sequential(torch.nn.Embedding(100, 8), torch.nn.Linear(8, 8), torch.nn.Linear(8, 100))
        >>> {name: str(decision.role) for name, decision in read_roles(model).items() if "weight" in name}
        {'0.weight': 'embedding', '1.weight': 'matrix', '2.weight': 'output'}
    """
    model = unwrap(model)
    entries = named_params(model)
    rules = _Rules(model, entries)
    found = {entry.name: rules.decide(entry, None) for entry in entries}
    if example is None and not no_forward and any(decision.uncertain for decision in found.values()):
        example = own_batch(model)
    if example is not None and not no_forward:
        watched = watch(model, example, rules.layers)
        if watched.notes is not None:
            return {entry.name: rules.decide(entry, watched.notes) for entry in entries}
        no_forward = watched.why_not
    return {name: evolve(decision, no_forward=no_forward) for name, decision in found.items()}


class _Rules:
    """The rules for one model."""

    def __init__(self, model: nn.Module, entries: list[NamedParam]) -> None:
        self.structure = Structure(model)
        self.by_param = {id(entry.param): entry for entry in entries}
        self.told = told_by_libraries(self.structure)
        self.layers = frozenset(
            id(param)
            for module in self.structure.modules.values()
            for param in module._parameters.values()
            if param is not None
            and (is_layer(module) or isinstance(module, nn.MultiheadAttention | nn.RNNBase))
        )
        marked = any(getattr(entry.param, mark, False) for entry in entries for mark in _MARKS)
        self.conventions = Conventions(self.structure, self.told, marked=marked)

    def decide(self, entry: NamedParam, notes: Notes | None) -> RoleDecision:
        """Return what a parameter is; `notes` is what a forward showed, None where none ran."""
        shape = tuple(entry.param.shape)
        settled = by_shape(shape, entry.param.dtype)
        if settled is not None:
            return settled
        if entry.param.numel() == 0:
            return RoleDecision.elementwise("empty")
        found = [self._at(entry, owner, notes) for owner in entry.owners]
        if id(entry.param) in self.told.heads and not any(one.role is Role.EMBEDDING for one in found):
            return RoleDecision.output(f"{self.told.heads[id(entry.param)]} returns it")
        return tied_role(found)

    def _at(self, entry: NamedParam, owner: tuple[str, nn.Module, str], notes: Notes | None) -> RoleDecision:
        """Return what a parameter is in one of its places."""
        shape = tuple(entry.param.shape)
        target = target_of(owner, self.structure.modules)
        if target is not None:
            owner, scales = target
            if scales:
                return RoleDecision.elementwise("the gain of a parametrized weight")
        name, module, attribute = owner
        adapted = self._adapted(entry, name, module, notes)
        if adapted is not None and adapted.role is not Role.MATRIX:
            factor = RoleDecision.elementwise(f"low-rank factor of a layer that is {adapted.role}")
            return factor.doubted() if adapted.uncertain else factor
        found = by_type(self.structure, owner, shape)
        if isinstance(module, nn.Bilinear) and attribute == "weight":
            return self._layer(entry, name, module, notes)
        if found is not None:
            return found if notes is None else with_view(entry, found, notes)
        if not is_layer(module) or attribute != "weight":
            bare = self.conventions.bare(owner, shape, adapted=adapted is not None)
            return bare if notes is None else verdict(entry, notes) or bare
        return self._layer(entry, name, module, notes)

    def _layer(self, entry: NamedParam, name: str, module: nn.Module, notes: Notes | None) -> RoleDecision:
        """Return what the weight of a layer is."""
        shape = tuple(entry.param.shape)
        view, known = layer_view(self.structure, name, module, shape)
        certain = self.conventions.certain(name, module)
        if known:
            certain = RoleDecision.matrix(
                f"a part of {type(self.structure.modules[name.rpartition('.')[0]]).__name__}"
            )
        guess = certain or self.conventions.layer(name, module)
        if guess.role is Role.MATRIX:
            guess = evolve(guess, view=view)
            if not known and self.conventions.may_be_fused(name, module):
                why = "no layer takes as many features as it gives: it may be several matrices"
                guess = guess.doubted(why, Doubt.LAYOUT)
        if notes is None:
            return guess
        seen = verdict(entry, notes, view)
        leaves = seen is not None and seen.role is Role.OUTPUT and not seen.uncertain
        if certain is not None and not (leaves and self.told.has_heads):
            return with_view(entry, guess, notes)
        return self._settled(seen, guess)

    def _settled(self, seen: RoleDecision | None, guess: RoleDecision) -> RoleDecision:
        """Return what a forward shows, or the convention where it shows nothing, or doubts the same."""
        if seen is None:
            return guess
        if seen.doubt is Doubt.ROLE and guess.doubt is not Doubt.ROLE and seen.role is guess.role:
            return evolve(seen, doubt=Doubt.NONE, reason=f"{seen.reason}; {guess.reason}")
        return seen

    def _adapted(
        self, entry: NamedParam, name: str, module: nn.Module, notes: Notes | None
    ) -> RoleDecision | None:
        """Return what the layer is that a low-rank factor adapts; None for everything else."""
        parent = name
        for _ in range(2):
            parent, _, child = parent.rpartition(".")
            holder = self.structure.modules.get(parent)
            base = None if holder is None else holder._modules.get("base_layer")
            factors = holder is not None and any(key.startswith("lora_") for key in holder._modules)
            adapts = holder is not None and (factors or is_a(holder, "peft."))
            if base is None or child == "base_layer" or not adapts:
                continue
            weight = base._parameters.get("weight")
            adapted = None if weight is None else self.by_param.get(id(weight))
            return RoleDecision.embedding("adapted") if adapted is None else self.decide(adapted, None)
        own = name.endswith(".base_layer")  # it is what factors adapt, however large these are
        beside = None if own else self.structure.base_of(name, module, entry.param)
        found = None if beside is None else self.decide(self.by_param[id(beside)], notes)
        return None if found is None or found.role is Role.MATRIX else found
