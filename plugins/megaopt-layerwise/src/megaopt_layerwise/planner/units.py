"""What is packed: whole works, or runs of the matrices of a batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from attrs import frozen

from megaopt_layerwise.planner.works import Work

__all__ = ["Unit", "divided_into_units", "whole_units"]


@frozen
class Unit:
    """What goes to one rank.

    Args:
        name: of the work that it is, or is a part of.
        load: what is balanced: operations, or elements.
        bytes: of state.
        ranks: those that can own it; None: all.
        matrices: how many of a batch it has; 0: the work is not divided.
    """

    name: str
    load: float
    bytes: float
    ranks: tuple[int, ...] | None = None
    matrices: int = 0


def whole_units(works: Iterable[Work], by: Callable[[Work], float]) -> list[Unit]:
    """Return one unit a work.

    Args:
        works: what to share out.
        by: the load of a work.
    """
    return [Unit(work.name, by(work), work.state_bytes, work.ranks) for work in works]


def divided_into_units(works: Iterable[Work], most_load: float) -> list[Unit]:
    """Return units of at most some load where batches allow it: runs of whole matrices.

    Args:
        works: what to share out, by cost.
        most_load: operations above which a batch is divided.
    """
    units: list[Unit] = []
    for work in works:
        if work.matrices == 1 or work.cost <= most_load:
            units.append(Unit(work.name, work.cost, work.state_bytes, work.ranks))
            continue
        run = max(int(most_load * work.matrices / work.cost), 1)
        for first in range(0, work.matrices, run):
            count = min(run, work.matrices - first)
            share = count / work.matrices
            units.append(
                Unit(work.name, share * work.cost, share * work.state_bytes, work.ranks, matrices=count)
            )
    return units
