"""From works and ranks to owners: the policies, one pure function."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

from megaopt_core.errors import ShardingError
from megaopt_layerwise.planner.cost_model import CostModel
from megaopt_layerwise.planner.packing import Loads, pack
from megaopt_layerwise.planner.plan import OwnerPlan, Owners
from megaopt_layerwise.planner.works import Work

__all__ = ["OwnerPolicy", "plan_owners"]


class OwnerPolicy(StrEnum):
    """What is balanced.

    `ELEMENTS`: elements, bucket by bucket. `BUCKET`: cost, bucket by bucket, with the loads of earlier buckets carried
    over. `GLOBAL`: cost and bytes of state over the whole model.
    """

    ELEMENTS = "elements"
    BUCKET = "bucket"
    GLOBAL = "global"


def plan_owners(
    works: Sequence[Work],
    ranks: int,
    *,
    policy: OwnerPolicy = OwnerPolicy.GLOBAL,
    model: CostModel | None = None,
    most_memory: float = 1.1,
) -> OwnerPlan:
    """Return who steps what. Pure: equal arguments give equal plans, on every rank.

    Args:
        works: one a parameter, in any order.
        ranks: number of ranks, counted from 0.
        policy: what is balanced.
        model: weighs operations against exchanged bytes; None: the default one.
        most_memory: bytes of state of the fullest rank over their mean that `GLOBAL` stays below where it can.

    Raises:
        ShardingError: names occur twice, or a work names a rank that is not there.

    Example:
        >>> works = [Work(name, cost, numel=1, state_bytes=8) for name, cost in (("a", 3.0), ("b", 2.0), ("c", 1.0))]
        >>> plan = plan_owners(works, 2)
        >>> {name: owners.ranks for name, owners in plan.owners.items()}, plan.compute_imbalance
        ({'a': (0,), 'b': (1,), 'c': (1,)}, 1.0)
    """
    _require_sound(works, ranks)
    model = model or CostModel()
    loads = Loads(ranks)
    owner: dict[str, int] = {}
    if policy is OwnerPolicy.GLOBAL:
        owner.update(pack(works, loads, by=lambda work: work.cost, most_memory=most_memory))
    else:
        by_bucket: dict[int, list[Work]] = {}
        for work in works:
            by_bucket.setdefault(work.bucket, []).append(work)
        for _, some in sorted(by_bucket.items()):
            if policy is OwnerPolicy.ELEMENTS:
                owner.update(pack(some, Loads(ranks), by=lambda work: float(work.numel)))
            else:
                owner.update(pack(some, loads, by=lambda work: work.cost))
    return _plan(works, {name: Owners((rank,)) for name, rank in owner.items()}, ranks, model)


def _plan(works: Sequence[Work], owners: dict[str, Owners], ranks: int, model: CostModel) -> OwnerPlan:
    costs, numels, state = [0.0] * ranks, [0.0] * ranks, [0.0] * ranks
    for work in works:
        (rank,) = owners[work.name].ranks
        costs[rank] += work.cost
        numels[rank] += work.numel
        state[rank] += work.state_bytes
    seconds = tuple(model.compute_seconds(cost) for cost in costs)
    ordered = {work.name: owners[work.name] for work in works}
    return OwnerPlan(ordered, tuple(costs), tuple(numels), tuple(state), seconds)


def _require_sound(works: Sequence[Work], ranks: int) -> None:
    if ranks < 1:
        raise ShardingError(f"plan_owners: {ranks} ranks; there is at least 1")
    seen: set[str] = set()
    for work in works:
        if work.name in seen:
            raise ShardingError(f"plan_owners: two works are called {work.name!r}")
        seen.add(work.name)
        if work.ranks is not None and (work.ranks[0] < 0 or work.ranks[-1] >= ranks):
            raise ShardingError(
                f"plan_owners: {work.name!r} names the ranks {work.ranks}; there are 0 to {ranks - 1}"
            )
