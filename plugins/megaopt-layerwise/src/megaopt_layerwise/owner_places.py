"""Where the owner of each matrix stands, along the axis that shares optimizers out and along the one that cuts."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence

from attrs import frozen

from megaopt_core.params import ParamSpec, RankCoordinates
from megaopt_layerwise.planner import Carried, Owners, Work, plan_owners, work_of
from megaopt_layerwise.units import cutting

__all__ = ["Owner", "is_at", "owners_where_cut"]


@frozen
class Owner:
    """Where the owner of a matrix stands among the ranks that hold it or a part of it.

    Args:
        shared: along the axis that shares its optimizer out; several where peers or a batch's owners share it.
        cut: along the axis that cuts the matrix; 0 where none does.
    """

    shared: Owners
    cut: int = 0

    @property
    def data(self) -> int:
        """The first place along the axis that shares its optimizer out."""
        return self.shared.ranks[0]


def is_at(spec: ParamSpec, place: RankCoordinates, axes: Container[str] | None = None) -> bool:
    """Return whether the ranks at a place have a parameter, or parts of it, as far as some axes tell; None: all."""
    return all(
        each.index is None
        or (axes is not None and each.axis not in axes)
        or each.index == place.get(each.axis, 0)
        for each in spec.placements
    )


def owners_where_cut(
    specs: Sequence[ParamSpec], shared: Mapping[str, Owners], experts_at: tuple[int, int]
) -> dict[str, Owner]:
    """Return owners at given places along the data axis, balanced over the ranks that have parts.

    Experts fill up what dense matrices leave unequal on the same ranks, where `ep` lies inside `dp`.

    Args:
        specs: what the ranks at one place of the experts hold.
        shared: where owners stand along the data axis.
        experts_at: that place along `ep`, and how many there are.
    """
    cut: dict[tuple[bool, str, int, int], list[Work]] = {}
    for spec in specs:
        axis = cutting(spec)
        if axis is not None:
            data = shared[spec.name].ranks[0]
            cut.setdefault((spec.is_expert, axis.axis, axis.size, data), []).append(work_of(spec))
    place, count = experts_at
    loads: dict[tuple[int, int], Carried] = {}
    places: dict[str, int] = {}
    for (is_expert, _, size, data), works in sorted(cut.items(), key=lambda entry: entry[0]):
        carried = loads.get((size, data * count + place)) if is_expert else None
        plan = plan_owners(works, size, carried=carried)
        if not is_expert:
            loads[size, data] = Carried(plan.costs, plan.state_bytes)
        places |= {name: owners.ranks[0] for name, owners in plan.owners.items()}
    return {spec.name: Owner(shared[spec.name], places.get(spec.name, 0)) for spec in specs}
