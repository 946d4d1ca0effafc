"""The one entry: a decision for every parameter of a model, read from it."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

from torch import nn

from megaopt_core.errors import BrokenPluginWarning
from megaopt_core.params import NamedParam, Role, RoleDecision, named_modules, named_params, unwrap
from megaopt_core.routing import (
    by_module_type,
    by_shape,
    doubted,
    elementwise,
    embedding,
    is_projection,
    output,
    target_of,
    tied_role,
)
from megaopt_roles.adapters import adapted_role, factor_role
from megaopt_roles.example.run import run_example
from megaopt_roles.example.verdicts import with_example
from megaopt_roles.forward.sources.module_classes import is_readable
from megaopt_roles.heads import find_heads
from megaopt_roles.model.features import taken_by
from megaopt_roles.model.reading import ModelReading
from megaopt_roles.scripted import stand_ins
from megaopt_roles.splits import with_split
from megaopt_roles.stream import Stream
from megaopt_roles.uncalled import called_twins
from megaopt_roles.uses import by_uses, is_stack_bias

__all__ = ["read_roles"]


def read_roles(model: nn.Module, example: Any = None) -> dict[str, RoleDecision]:
    """Find what every parameter of a model is, as far as its modules and their forwards tell.

    The module that owns a parameter decides, by its type, and by what its forward does with it. Names decide nothing,
    and no code of the model is run, unless there is an example to run it with. A decision is certain only when every
    step to it was. What is said explicitly, by attributes or registered views, is the core's business.

    Args:
        model: any module, on any device (meta too), wrapped or not.
        example: a batch to run one forward with, on the meta device: a tensor, a tuple of arguments or a mapping of
            keyword arguments. What it shows wins over what the source says.

    Returns:
        A decision for every parameter, frozen ones included, by canonical name, in registration order.

    Example:
        >>> import torch
        >>> model = torch.nn.Sequential(torch.nn.Embedding(100, 8), torch.nn.Linear(8, 8), torch.nn.Linear(8, 100))
        >>> {name: str(decision.role) for name, decision in read_roles(model).items() if "weight" in name}
        {'0.weight': 'embedding', '1.weight': 'matrix', '2.weight': 'output'}
    """
    rules = _Rules(unwrap(model))
    entries = named_params(model)
    found = rules.decide_all(entries)
    seen = None if example is None else run_example(unwrap(model), example)
    if seen is not None:
        found.update(
            {
                entry.name: with_example(
                    entry, found[entry.name], seen, is_known=rules.is_known(entry, found[entry.name].role)
                )
                for entry in entries
            }
        )
    return found


class _Rules:
    """The rules, with everything that they look up."""

    def __init__(self, model: nn.Module) -> None:
        self.modules = dict(named_modules(model))
        self._stand_ins = stand_ins(model, self.modules.values())
        if self._stand_ins:
            model = self._stand_ins[id(model)]
            self.modules = dict(named_modules(model))
        self._asking = set[int]()
        self.reading = ModelReading(self.modules)
        self.ends = self.reading.ends(model)[0] - self.reading.guessed
        self.stream = Stream(model, self.modules, self.reading)
        self.heads = find_heads(model, self.modules, self.reading, self.stream)

    def decide_all(self, entries: Sequence[NamedParam]) -> dict[str, RoleDecision]:
        """Return the decisions by name; what a fault of this package keeps from being decided is in doubt."""
        found: dict[str, RoleDecision] = {}
        faults: dict[str, Exception] = {}
        for entry in entries:
            try:
                found[entry.name] = self.decide(entry)
            except Exception as error:  # noqa: BLE001 - one parameter that is left to a fallback stops no training
                faults[entry.name] = error
                why = f"megaopt-roles failed to decide it ({type(error).__name__}: {error})"
                found[entry.name] = doubted(elementwise(why))
        if faults:
            name, first = next(iter(faults.items()))
            if len(faults) == len(entries):
                raise first
            warnings.warn(
                f"megaopt-roles failed to decide what {len(faults)} of {len(entries)} parameters are, which are in "
                f"doubt now, as {name} ({type(first).__name__}: {first}); please report it with the model",
                BrokenPluginWarning,
                stacklevel=3,
            )
        return found

    def decide(self, entry: NamedParam) -> RoleDecision:
        shape = tuple(entry.param.shape)
        settled = by_shape(shape, entry.param.dtype)
        if settled is not None:
            return settled
        found = [self._at(entry.param, owner) for owner in entry.owners]
        return tied_role(found)

    def is_known(self, entry: NamedParam, role: Role) -> bool:
        """True where a source shows, too, what an example would hold against the role that it gives a parameter.

        That a layer takes the output of a head, as of a policy before its critic; or that what a gate makes is returned
        as a part of what it weighs.
        """
        keys = {id(entry.param), *(id(module) for _, module, _ in entry.owners)}
        if role is Role.MATRIX:
            return any(map(self.stream.weighs, keys))
        return role is Role.OUTPUT and not keys.isdisjoint(self.reading.consumed)

    def _at(self, param: nn.Parameter, owner: tuple[str, nn.Module, str]) -> RoleDecision:
        shape = tuple(param.shape)
        target = target_of(owner, self.modules)
        if target is not None:
            owner, scales = target
            if scales:
                return elementwise("the gain of a parametrized weight")
        name, module, attribute = owner
        module = self._stand_ins.get(id(module), module) if self._stand_ins else module
        adapted = adapted_role(name, module, self.modules, self.heads)
        if adapted is not None:
            return adapted
        if attribute == "weight" and id(module) in self.heads:
            return self.heads[id(module)]
        decision = by_module_type(module, attribute, shape)
        if decision is not None and attribute == "weight":
            return self._if_followed(name, module, param, with_split(decision, module, shape, self.reading))
        if decision is not None:
            recurrent = isinstance(module, nn.RNNBase | nn.RNNCellBase) and self._is_indexed(param)
            return self._looked_up(module, param) if recurrent else decision
        original = self.reading.changes.get(id(module))
        if original is None:
            return self._bare(owner, param)
        holder = name.rpartition(".")[0]
        changed = self._at(original, (holder, self.modules[holder], "original"))
        return factor_role(by_uses(shape, self.reading.uses.get(id(param), ()), readable=True), changed)

    def _bare(self, owner: tuple[str, nn.Module, str], param: nn.Parameter) -> RoleDecision:
        """Return the decision for a parameter that its module uses by hand."""
        name, module, attribute = owner
        shape, uses = tuple(param.shape), self.reading.uses
        readable = self.reading.analysis(module).readable
        found = by_uses(shape, uses.get(id(param), ()), readable=readable)
        if is_stack_bias(module, shape, uses) and found.role is not Role.MATRIX:
            return elementwise("bias of a stack of matrices: one row each")
        if found.role is not Role.MATRIX:
            vector = found.role is Role.ELEMENTWISE and not found.uncertain
            return self.heads.get(id(param), found) if vector and self._makes_score(param) else found
        head, found = self.heads.get(id(param)), with_split(found, param, shape, self.reading)
        if head is not None and not (head.uncertain and found.view is not None and found.view.batch_dims):
            return doubted(head, found.reason) if found.uncertain else head
        consumed, ends = id(param) in self.reading.consumed, id(param) in self.ends
        if id(param) in self.reading.scored - self.reading.consumed:
            return output("a loss of classes takes its product")
        if self.stream.takes(id(param)) or self.stream.weighs(id(param)) or (consumed and head is None):
            return found
        if ends or head is not None:
            heads = {key for key, head in self.heads.items() if not head.uncertain}
            if not consumed and self.stream.adds_to(id(param), heads):
                return output("its product is added to that of an output head")
            return doubted(found, "it may be a head, or several")
        full = f"{name}.{attribute}" if name else attribute
        return self._like_twins(full, param, found, "no layer that was read takes the output of the product")

    def _makes_score(self, param: nn.Parameter) -> bool:
        """True for a vector of which every product sums over features, and that is not used entry by entry.

        How far activations are from the rows of a table are no features.
        """
        kinds = {use.kind for use in self.reading.uses.get(id(param), ())}
        sums = taken_by(param, self.reading.uses)
        if "contracted" not in kinds or "elementwise" in kinds or 1 in sums:
            return False
        calls = (call for module in self.modules.values() for call in self.reading.calls(module))
        met = frozenset[Any]().union(*(call.deps for call in calls if call.module is param))
        distances = self.reading.used_as("elementwise") - self.reading.used_as("contracted")
        return self.reading.origins(met)[0].isdisjoint(distances & self.reading.uses.keys())

    def _like_twins(
        self, name: str, layer: nn.Module | nn.Parameter, decision: RoleDecision, why: str
    ) -> RoleDecision:
        """Return the decision for what stands in a list with others like it, or a doubtful one where these differ."""
        if id(layer) in self._asking:
            return doubted(decision, why)  # by one of its twins
        self._asking.add(id(layer))
        alike = [self._at(*twin) for twin in called_twins(name, layer, self.modules, self.reading)]
        self._asking.remove(id(layer))
        if alike and not any(one.uncertain or one != alike[0] for one in alike):
            return alike[0]
        return doubted(decision, why)

    def _is_indexed(self, param: nn.Parameter) -> bool:
        return any(use.kind == "indexed" for use in self.reading.uses.get(id(param), ()))

    def _looked_up(self, module: nn.Module, param: nn.Parameter) -> RoleDecision:
        """Return the decision for a projection whose weight is a table for some of what it is given."""
        if self.reading.takes_codes(module, param):
            return embedding("all that it takes are one-hot codes")
        return doubted(
            embedding("what is given looks parts of its weight up, by an index or a one-hot encoding")
        )

    def _if_followed(
        self, name: str, module: nn.Module, param: nn.Parameter, decision: RoleDecision
    ) -> RoleDecision:
        """Return the decision for a projection, doubtful where its output, or its weight, was lost sight of."""
        if decision.role is not Role.MATRIX or not is_projection(module):
            return decision
        if not is_readable(module):
            return doubted(decision, "its forward was replaced by one that cannot be read")
        if self._is_indexed(param):
            return self._looked_up(module, param)
        if id(param) in self.reading.used_as("passed"):
            return doubted(decision, "its weight goes to a function whose source cannot be read")
        if id(module) in self.ends & self.reading.scaled and (
            not self.stream.takes(id(module)) or self.stream.begins(id(module)) & self.heads.keys()
        ):
            return doubted(decision, "nothing but a norm or a gain stands between it and the model's output")
        if id(module) in self.stream.refining:
            return doubted(decision, "it may make an output, or refine one, that the model returns")
        if self.reading.is_followed(name, module) or self.stream.weighs(id(module)):
            return decision
        if id(module) in self.ends:
            sure = self.stream.takes(id(module))
            return decision if sure else doubted(decision, "it may be the head of a model of one width")
        return self._like_twins(name, module, decision, "no layer that was read takes its output")
