"""What an owner planner answers: who steps what, and how well the work is shared out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum

from attrs import frozen

from megaopt_layerwise.planner.cost_model import CostModel
from megaopt_layerwise.planner.works import Work

__all__ = ["Division", "OwnerPlan", "Owners", "imbalance", "plan_of"]


class Division(StrEnum):
    """How one parameter is shared out.

    `WHOLE`: one rank steps it. `PEERS`: a block of consecutive ranks steps parts of it together. `MATRICES`: each of
    some ranks steps whole matrices of the batch that it is.
    """

    WHOLE = "whole"
    PEERS = "peers"
    MATRICES = "matrices"


@frozen
class Owners:
    """Who steps one parameter.

    Args:
        ranks: ascending. Of peers a block that begins at a multiple of its length, counted in the ranks that can own
            the parameter; the first has the first part.
        division: how they share it.
        bounds: with `MATRICES`, rank number `i` of `ranks` has the matrices from `bounds[i]` up to `bounds[i + 1]`.

    Example:
        >>> owners = Owners((2, 5), Division.MATRICES, (0, 3, 8))
        >>> owners.matrices(5), owners.matrices(4)
        ((3, 8), (0, 0))
    """

    ranks: tuple[int, ...]
    division: Division = Division.WHOLE
    bounds: tuple[int, ...] = ()

    def matrices(self, rank: int) -> tuple[int, int]:
        """Return `[first, last)` of the matrices that a rank has, with `MATRICES`; an empty range for other ranks.

        Args:
            rank: the rank.
        """
        if rank not in self.ranks or not self.bounds:
            return 0, 0
        at = self.ranks.index(rank)
        return self.bounds[at], self.bounds[at + 1]


def imbalance(values: Sequence[float]) -> float:
    """Return the largest of some loads over their mean; 1 where there is nothing to share.

    Args:
        values: one a rank.

    Example:
        >>> imbalance([1.0, 2.0, 3.0])
        1.5
    """
    total = sum(values)
    return max(values) * len(values) / total if total else 1.0


@frozen
class OwnerPlan:
    """Who steps every parameter.

    Args:
        owners: name to owners, in the order in which the works were given.
        costs: operations of a step on each rank; what peers do again counts on each of them.
        numels: elements that each rank steps.
        state_bytes: bytes of state on each rank.
        seconds: time of a step that the cost model expects of each rank, with what peers exchange.
    """

    owners: Mapping[str, Owners]
    costs: tuple[float, ...]
    numels: tuple[float, ...]
    state_bytes: tuple[float, ...]
    seconds: tuple[float, ...]

    @property
    def compute_imbalance(self) -> float:
        """Largest operations of a rank over their mean."""
        return imbalance(self.costs)

    @property
    def memory_imbalance(self) -> float:
        """Largest bytes of state of a rank over their mean."""
        return imbalance(self.state_bytes)

    @property
    def step_seconds(self) -> float:
        """The time of a step that the cost model expects of the slowest rank."""
        return max(self.seconds)

    def counts(self) -> dict[Division, int]:
        """Return how many parameters are shared out in each way."""
        found = dict.fromkeys(Division, 0)
        for owners in self.owners.values():
            found[owners.division] += 1
        return found


def plan_of(works: Sequence[Work], owners: Mapping[str, Owners], ranks: int, model: CostModel) -> OwnerPlan:
    """Return a plan with what every rank has to do.

    Args:
        works: what was shared out.
        owners: of every work.
        ranks: how many there are.
        model: tells the time of a step.
    """
    costs, numels, state, seconds = ([0.0] * ranks for _ in range(4))
    for work in works:
        shared = owners[work.name]
        peers = len(shared.ranks) if shared.division is Division.PEERS else 1
        for at, rank in enumerate(shared.ranks):
            share = 1.0 / peers
            if shared.division is Division.MATRICES:
                share = (shared.bounds[at + 1] - shared.bounds[at]) / work.matrices
            cost = model.part_cost(work, peers) if peers > 1 else share * work.cost
            costs[rank] += cost
            numels[rank] += share * work.numel
            state[rank] += share * work.state_bytes
            seconds[rank] += model.compute_seconds(cost) + model.exchange_seconds(work.exchanged, peers)
    ordered = {work.name: owners[work.name] for work in works}
    return OwnerPlan(ordered, tuple(costs), tuple(numels), tuple(state), tuple(seconds))
