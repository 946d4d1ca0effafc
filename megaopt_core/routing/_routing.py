"""A routing: which optimizer, group and strategy every parameter gets, and why, as pure data."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from attrs import Factory, evolve, frozen

from megaopt_core.errors import RoutingChangedError
from megaopt_core.params._names import shown
from megaopt_core.params._overrides import ParamGroupOverride
from megaopt_core.params._roles import RoleDecision
from megaopt_core.params._shards import Box, RankCoordinates, Shard
from megaopt_core.params._specs import ParamSpec
from megaopt_core.routing._groups import ChildSpec, GroupSpec

__all__ = ["UNSHARDED", "NameMap", "ParamRoute", "Routing"]

UNSHARDED = "replicated"
"""The strategy of a model that nobody claims."""

type NameMap = Callable[[int, str], str]
"""Maps (chunk index, local name) to the globally unique name."""


@frozen
class ParamRoute:
    """Where one trainable parameter goes, and why.

    Args:
        spec: the parameter as pure data; `spec.name` is its globally unique canonical name.
        chunk: index of its model chunk.
        box: this rank's part of `spec.shape`.
        aliases: other names of the same tensor.
        decision: its role, view and the reason for them.
        override: the combined override.
        matched: for each key that matched, what matched and what it sets.
        reason: why it gets this optimizer.
        strategy: name of the sharding strategy.
        module_type: class name of the module that owns it.
        shared: counted elsewhere (tied across pipeline stages).
        tensor_parallel: cut over the tensor-parallel group.
        partition_dim: dimension that tensor parallelism cuts; -1 for none.
        grad_norm_group: name of the norm that it counts in; None: the main one.
    """

    spec: ParamSpec
    chunk: int
    box: Box
    aliases: tuple[str, ...]
    decision: RoleDecision
    override: ParamGroupOverride
    matched: tuple[str, ...]
    reason: str
    strategy: str
    module_type: str
    shared: bool = False
    tensor_parallel: bool = False
    partition_dim: int = -1
    grad_norm_group: str | None = None

    @property
    def name(self) -> str:
        """The globally unique canonical name."""
        return self.spec.name

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of this rank's tensor."""
        return self.box[1]

    @property
    def shard(self) -> Shard:
        """This rank's part of the logical tensor."""
        return self.spec.part(self.box)


@frozen
class Routing:
    """The whole decision, before anything is built: pure data, equal on every rank but for what follows from `params`.

    Args:
        params: canonical name to route, every trainable parameter of this rank, in model order.
        groups: all groups of all ranks, in their one order; a group may have no parameter on this rank.
        children: the optimizers, in their one order.
        frozen: names of the parameters that do not train.
        excluded: names of those that an override sends to no optimizer (`"none"`): others step them.
        grad_norm_groups: names of the separate gradient norms of all ranks, sorted.
        axes: number of ranks along each axis of the world.
        rank: this rank's coordinates on these axes.
        digest: equal on two ranks that hold the same parameters and send them to the same groups; empty: not known.
        sharding: name of the strategy that the configuration asks for, or that claims the model where it asks for none.
    """

    params: Mapping[str, ParamRoute]
    groups: tuple[GroupSpec, ...]
    children: tuple[ChildSpec, ...]
    frozen: tuple[str, ...] = ()
    grad_norm_groups: tuple[str, ...] = ()
    axes: Mapping[str, int] = Factory(dict)
    rank: RankCoordinates = Factory(dict)
    excluded: tuple[str, ...] = ()
    digest: bytes = b""
    sharding: str = UNSHARDED

    @classmethod
    def joined(cls, routings: Sequence[Routing]) -> Routing:
        """Return what several optimizers were routed by, as one: groups and children in the order that is given.

        Args:
            routings: at least one, whose parameters have names of their own.
        """
        if all(routing is routings[0] for routing in routings):
            return routings[0]
        params: dict[str, ParamRoute] = {}
        groups: list[GroupSpec] = []
        children: list[ChildSpec] = []
        for routing in routings:
            first = len(groups)
            for name, entry in routing.params.items():
                params[name] = evolve(entry, spec=evolve(entry.spec, group=entry.spec.group + first))
            children += [
                evolve(child, groups=tuple(group + first for group in child.groups))
                for child in routing.children
            ]
            groups += routing.groups
        return evolve(
            routings[0],
            params=params,
            groups=tuple(groups),
            children=tuple(children),
            frozen=_others(params, (routing.frozen for routing in routings)),
            excluded=_others(params, (routing.excluded for routing in routings)),
            grad_norm_groups=tuple(
                sorted({name for routing in routings for name in routing.grad_norm_groups})
            ),
            digest=b"",
        )

    @property
    def readers(self) -> tuple[str, ...]:
        """Distributions and versions of the plugins that read roles from the model, sorted."""
        return tuple(
            sorted({entry.decision.reader for entry in self.params.values() if entry.decision.reader})
        )

    def names_of(self, group: int) -> tuple[str, ...]:
        """Return the names of this rank's parameters in a group.

        Args:
            group: index into `groups`.
        """
        return tuple(name for name, entry in self.params.items() if entry.spec.group == group)

    def child_of(self, name: str) -> ChildSpec:
        """Return the optimizer that steps a parameter.

        Args:
            name: canonical name.
        """
        group = self.params[name].spec.group
        return next(child for child in self.children if group in child.groups)

    def require_same(self, other: Routing, names: Mapping[str, str] | None = None) -> None:
        """Raise unless another routing sends every parameter to the same optimizer, group and strategy.

        Args:
            other: the routing that would be computed now.
            names: what parameters of this one are called there, where that is something else.

        Raises:
            RoutingChangedError: it differs; the message names the parameters.
        """
        renamed = {(names or {}).get(name, name): name for name in self.params}
        changed = [
            name
            for name in {**renamed, **other.params}
            if self._where(renamed.get(name, name)) != other._where(name)
        ]
        if changed:
            raise RoutingChangedError(
                f"the new configuration or overrides change the routing of {len(changed)} parameters since "
                f"the model was wrapped: {shown(changed)}. Wrap the model again with the new configuration",
                names=changed,
            )

    def _where(self, name: str) -> tuple[Any, ...] | None:
        if name not in self.params:
            return None
        entry = self.params[name]
        return self.groups[entry.spec.group].key, self.child_of(name).strategy


def _others(params: Mapping[str, ParamRoute], names: Iterable[Iterable[str]]) -> tuple[str, ...]:
    """Return names, each once, but for those of parameters that are stepped."""
    return tuple(dict.fromkeys(name for some in names for name in some if name not in params))
