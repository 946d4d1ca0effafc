"""Which way the values of each matrix take, for reports."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from attrs import frozen

from megaopt_core.params import ParamSpec
from megaopt_core.sharding import LiveModel
from megaopt_layerwise.layout import LayerWiseLayout
from megaopt_layerwise.owner_places import Owner
from megaopt_layerwise.planner import Division, Owners
from megaopt_layerwise.shares import memory_shares
from megaopt_layerwise.units import cutting

__all__ = ["Route", "routes_of"]


@frozen
class Route:
    """Who owns a matrix, and what this rank sends of its values to the other data-parallel ranks.

    Args:
        owner: where the owner stands, in words.
        gathered: bytes.
    """

    owner: str
    gathered: int


def routes_of(layout: LayerWiseLayout, model: LiveModel, groups: Collection[int]) -> Mapping[str, Route]:
    """Return the routes of the matrices of some groups that this rank holds or holds a part of.

    Args:
        layout: who owns what.
        model: the live model.
        groups: indices of the routing's groups.
    """
    owners = layout.owners(model.rank)
    return {
        name: _route(spec, owners[name], layout, model)
        for name, spec in layout.specs.items()
        if spec.group in groups and name in model.params
    }


def _route(spec: ParamSpec, owner: Owner, layout: LayerWiseLayout, model: LiveModel) -> Route:
    axis = cutting(spec)
    told = f"{spec.data_axis} {_shown(owner.shared)}"
    told += "" if axis is None else f", {axis.axis} {owner.cut}"
    mine = model.rank.get(spec.data_axis, 0)
    shares = dict(memory_shares(spec.box(model.rank)[1], owner.shared))
    others = layout.world.size(spec.data_axis) - 1
    return Route(told, shares.get(mine, 0) * others * spec.dtype.itemsize)


def _shown(owners: Owners) -> str:
    """Return who owns a matrix: `3`, peers `4-7`, or the owners of a batch `2, 5, 6`."""
    if owners.division is Division.PEERS:
        return f"{owners.ranks[0]}-{owners.ranks[-1]}"
    return ", ".join(map(str, owners.ranks))
