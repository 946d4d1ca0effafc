"""The parameters of a model's chunks with everything that routing needs to know about each."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from attrs import define, evolve, field, frozen

from megaopt_core.errors import PluginError, PluginHookError, RoutingError, ViewError, naming_user_function
from megaopt_core.parallel._groups import ProcessGroupCollection
from megaopt_core.params._names import NamedParam, named_params
from megaopt_core.params._parts import LogicalPart, logical_part
from megaopt_core.params._roles import RoleDecision
from megaopt_core.params._specs import ParamSpec
from megaopt_core.plugin_api._entries import OptimizerEntry
from megaopt_core.routing._roles.explicit import cut_by_attributes
from megaopt_core.routing._roles.infer import infer_roles
from megaopt_core.routing._routing import NameMap

__all__ = ["Inventory", "InventoryItem", "take_inventory"]


@lru_cache(4096)
def _same_object(*traits: Any) -> tuple[Any, ...]:
    return traits


@frozen(eq=False)
class InventoryItem:
    """One parameter of this rank.

    Args:
        name: globally unique canonical name.
        named: the parameter with its local names and owners.
        chunk: index of the model chunk.
        aliases: other global names of the same tensor.
        decision: its role with reason and view.
        part: this rank's part of the logical tensor over all tensor-parallel ranks.
        traits: its number type, shape and attributes, how it is cut and viewed, as one object for all parameters alike.
    """

    name: str
    named: NamedParam
    chunk: int
    aliases: tuple[str, ...]
    decision: RoleDecision
    part: LogicalPart
    traits: tuple[Any, ...] = field(init=False, repr=False)

    @traits.default
    def _traits(self) -> tuple[Any, ...]:
        part, view = self.part, self.decision.view
        return _same_object(
            self.param.dtype,
            self.is_expert,
            self.shared,
            repr(self.grad_norm_group),  # a user may have put there what has no hash
            self.shared_embedding,
            part.shape,
            part.placements,
            part.tensor_parallel,
            view,
            () if view is None else (view.head_sizes, view.head_columns),  # equal views may differ in these
        )

    @property
    def param(self) -> torch.nn.Parameter:
        """The live parameter, possibly on the meta device."""
        return self.named.param

    @property
    def is_expert(self) -> bool:
        """Whether the attribute `allreduce` is False, or it lies on the ranks of experts."""
        return self.part.is_expert

    @property
    def shared(self) -> bool:
        """Whether it is counted elsewhere."""
        return bool(getattr(self.param, "shared", False))

    @property
    def shared_embedding(self) -> bool:
        """Whether it is an embedding that pipeline stages share."""
        return bool(getattr(self.param, "shared_embedding", False))

    @property
    def grad_norm_group(self) -> str | None:
        """Name of the norm that it counts in."""
        return getattr(self.param, "grad_norm_group", None)

    @property
    def module_type(self) -> str:
        """Class name of the module that owns it."""
        return type(self.named.owners[0][1]).__name__

    def spec(self, optimizer: str, entry: OptimizerEntry, *, peers: int | None = None) -> ParamSpec:
        """Return the parameter as pure data, of the first group until groups have their order.

        Args:
            optimizer: name of the optimizer that steps it.
            entry: of the optimizer: how finely its work may be cut, and what it supports.
            peers: how many ranks were asked to step it together.
        """
        spec = self.spec_without_cost(optimizer, entry)
        cost = entry.step_cost(spec, self.decision.view)
        if not isinstance(cost, (int, float)) or not 0 <= cost < math.inf:
            raise PluginError(
                f"step_cost of optimizer {optimizer!r} returned {cost!r} for {self.name!r}; it must be a finite "
                "number, at least 0"
            )
        return evolve(spec, cost=float(cost), peers=peers)

    def spec_without_cost(self, optimizer: str, entry: OptimizerEntry) -> ParamSpec:
        """Return the parameter as pure data for an optimizer that may not take it: what it costs there is not asked.

        Args:
            optimizer: name of the optimizer.
            entry: of the optimizer.
        """
        return ParamSpec(
            name=self.name,
            shape=self.part.shape,
            dtype=self.param.dtype,
            grad_dtype=self.param.dtype,
            optimizer=optimizer,
            group=0,
            granularity=entry.granularity,
            cost=0.0,
            alignment=entry.alignment,
            view=self.decision.view,
            placements=self.part.placements,
            is_expert=self.is_expert,
            shared_embedding=self.shared_embedding,
            splits=entry.split_step is not None,
            takes_peers=entry.supports_peers,
        )


@define
class Inventory:
    """Every parameter of this rank's chunks, in model order, and what plugins that read them did wrong.

    Args:
        trainable: those that an optimizer is to step.
        frozen: those that do not train.
        failed: errors of plugins that could not read the model.
        excluded: those that train and that an override sends to no optimizer.
        no_forward: why a forward that was to show roles could not be run; empty: it ran, or none was to run.
    """

    trainable: list[InventoryItem]
    frozen: list[InventoryItem]
    failed: list[PluginHookError] = field(factory=list)
    excluded: list[InventoryItem] = field(factory=list)
    no_forward: str = ""

    def names(self) -> list[str]:
        """Return every name, aliases included."""
        every = (*self.trainable, *self.frozen, *self.excluded)
        return [name for item in every for name in (item.name, *item.aliases)]


def _require_view_fits(
    param: torch.nn.Parameter, name: str, decision: RoleDecision, part: LogicalPart
) -> None:
    """Raise unless the view of what attributes have cut fits the whole; what is not cut was looked at before."""
    if decision.view is not None and cut_by_attributes(param):
        try:
            decision.view.matrix_shapes(part.shape)
        except ViewError as error:
            raise ViewError(f"{name}: {decision.reason}: {error}") from None


def take_inventory(
    chunks: Sequence[torch.nn.Module],
    pgs: ProcessGroupCollection,
    fqn: NameMap | None = None,
    example: Any = None,
    no_forward: str = "",
) -> Inventory:
    """Return every parameter of the chunks with its role and its place in the logical tensor.

    Args:
        chunks: the model chunks.
        pgs: the process groups.
        fqn: maps `(chunk index, local name)` to a globally unique name.
        example: a batch for the one chunk that there is.
        no_forward: why no forward may be run; empty: one may.

    Raises:
        RoutingError: two parameters have one name, or tensor parallelism has cut one in a way that cannot be stepped.
        ViewError: a view does not fit the whole of a parameter that is cut.
    """
    if example is not None and len(chunks) != 1:
        raise RoutingError(f"example= needs a model of one chunk, got {len(chunks)} chunks")
    inventory = Inventory([], [])
    seen: dict[str, int] = {}
    for index, chunk in enumerate(chunks):
        decisions = infer_roles(chunk, example=example, no_forward=no_forward, failed=inventory.failed)
        inventory.no_forward = inventory.no_forward or next(
            (decision.no_forward for decision in decisions.values() if decision.no_forward), ""
        )
        for named in named_params(chunk):
            name, *aliases = (_named(fqn, index, local) for local in (named.name, *named.aliases))
            if not isinstance(name, str) or seen.get(name) == index:
                raise RoutingError(
                    f"fqn({index}, {named.name!r}) returned {name!r}; it must return a different name for "
                    "every parameter",
                    names=[named.name],
                )
            if name in seen:
                same = ": they are the same module" if chunks[seen[name]] is chunk else ""
                raise RoutingError(
                    f"model chunks {seen[name]} and {index} both have a parameter {name!r}{same}. Give models that "
                    "stand side by side as one torch.nn.ModuleList or ModuleDict; for chunks of a pipeline pass "
                    "fqn=lambda chunk, name: ..., which gives every parameter a name of its own",
                    names=[name],
                )
            seen[name] = index
            if named.param.is_inference():
                raise RoutingError(
                    f"parameter {name!r} cannot be trained, because it was made inside "
                    "torch.inference_mode(): make the model outside of it",
                    names=[name],
                )
            part = logical_part(named.param, name, pgs)
            _require_view_fits(named.param, name, decisions[named.name], part)
            _require_group_name(named.param, name)
            item = InventoryItem(name, named, index, tuple(aliases), decisions[named.name], part)
            (inventory.trainable if named.param.requires_grad else inventory.frozen).append(item)
    return inventory


def _named(fqn: NameMap | None, index: int, local: str) -> str:
    if fqn is None:
        return local
    with naming_user_function("fqn", f"({index}, {local!r})"):
        return fqn(index, local)


def _require_group_name(param: torch.Tensor, name: str) -> None:
    group = getattr(param, "grad_norm_group", None)
    if group is not None and not isinstance(group, str):
        raise RoutingError(
            f"parameter {name!r} has grad_norm_group={group!r}; it must be a name, or None", names=[name]
        )
