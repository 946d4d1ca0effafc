"""Owners over the whole model: whole works, divided batches, and peers where these make the step shorter."""

from __future__ import annotations

import math
from collections.abc import Sequence

from megaopt_layerwise.planner.blocks import Packed
from megaopt_layerwise.planner.cost_model import CostModel
from megaopt_layerwise.planner.packing import Loads, pack
from megaopt_layerwise.planner.peers import plan_peers
from megaopt_layerwise.planner.plan import Division, Owners, imbalance
from megaopt_layerwise.planner.refining import refine
from megaopt_layerwise.planner.units import Unit, divided_into_units, whole_units
from megaopt_layerwise.planner.works import Carried, Work

__all__ = ["plan_globally"]

_GOOD = 1.01
"""Largest load over the mean at which batches stay whole."""

_GOOD_ALONE = 1.03
"""Largest load over the mean at which no peers are looked for."""

_RUN = 0.02
"""Load of a run of a divided batch, in mean loads of a rank."""


def plan_globally(
    works: Sequence[Work],
    ranks: int,
    divisions: frozenset[Division],
    model: CostModel,
    most_memory: float,
    carried: Carried | None = None,
) -> dict[str, Owners]:
    """Return the owners of every work.

    Args:
        works: what to share out, in an order of their own.
        ranks: how many there are.
        divisions: how one work may be shared out.
        model: weighs operations against exchanged bytes.
        most_memory: bytes of state of the fullest rank over their mean.
        carried: what the ranks step besides.
    """
    present = 0.0 if carried is None else sum(carried.state_bytes)
    room = most_memory * (present + sum(work.state_bytes for work in works)) / ranks or math.inf
    units, owners, loads = _packed(whole_units(works, by=lambda work: work.cost), Loads(ranks, room, carried))
    divides = Division.MATRICES in divisions and any(work.matrices > 1 for work in works)
    if divides and imbalance(loads.load) > _GOOD:
        most_load = _RUN * sum(work.cost for work in works) / ranks
        divided = _packed(divided_into_units(works, most_load), Loads(ranks, room, carried))
        if max(divided[2].load) < max(loads.load):
            units, owners, loads = divided
    asked = any(_is_asked(work) for work in works)
    meets = Division.PEERS in divisions and any(work.most_peers > 1 for work in works)
    if meets and (asked or imbalance(loads.load) > _GOOD_ALONE):
        # Where whole owners fill memory more, peers may do so too, if that is what it takes to be faster.
        for most in sorted({room, max(room, *loads.bytes)}):
            shared = _with_peers(works, ranks, model, most, carried)
            if shared is not None and (asked or shared.step_seconds < model.compute_seconds(max(loads.load))):
                return {name: _block(*place) for name, place in shared.first_ranks.items()}
    return _owners(units, owners)


def _packed(units: Sequence[Unit], loads: Loads) -> tuple[Sequence[Unit], list[int], Loads]:
    owners = pack(units, loads)
    refine(units, owners, loads)
    return units, owners, loads


def _is_asked(work: Work) -> bool:
    return work.most_peers > 1 and (work.asked_peers or 1) > 1


def _with_peers(
    works: Sequence[Work], ranks: int, model: CostModel, room: float, carried: Carried | None
) -> Packed | None:
    """Return a plan with peers, None where some works cannot be owned by all ranks."""
    everywhere = tuple(range(ranks))
    if any(work.ranks not in (None, everywhere) for work in works):
        return None
    return plan_peers(works, ranks, model, room, carried)


def _block(first: int, size: int) -> Owners:
    division = Division.WHOLE if size == 1 else Division.PEERS
    return Owners(tuple(range(first, first + size)), division)


def _owners(units: Sequence[Unit], owners: Sequence[int]) -> dict[str, Owners]:
    """Return whole owners, and of batches the ranks that have some: each gets one run, the first rank the first."""
    found: dict[str, Owners] = {}
    counts: dict[str, dict[int, int]] = {}
    for unit, rank in zip(units, owners, strict=True):
        if unit.matrices:
            some = counts.setdefault(unit.name, {})
            some[rank] = some.get(rank, 0) + unit.matrices
        else:
            found[unit.name] = Owners((rank,))
    for name, some in counts.items():
        ranks = tuple(sorted(some))
        bounds = [0]
        for rank in ranks:
            bounds.append(bounds[-1] + some[rank])
        found[name] = Owners(ranks, Division.MATRICES, tuple(bounds)) if len(ranks) > 1 else Owners(ranks)
    return found
