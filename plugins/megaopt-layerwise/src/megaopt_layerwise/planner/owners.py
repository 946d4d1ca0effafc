"""From works and ranks to owners: the policies, one pure function."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from enum import StrEnum

from megaopt_core.errors import ShardingError
from megaopt_layerwise.planner.cost_model import CostModel
from megaopt_layerwise.planner.global_plan import plan_globally
from megaopt_layerwise.planner.packing import Loads, pack
from megaopt_layerwise.planner.plan import Division, OwnerPlan, Owners, plan_of
from megaopt_layerwise.planner.units import whole_units
from megaopt_layerwise.planner.works import Carried, Work

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
    divisions: Collection[Division] = (Division.WHOLE,),
    model: CostModel | None = None,
    most_memory: float = 1.1,
    carried: Carried | None = None,
) -> OwnerPlan:
    """Return who steps what. Pure: equal arguments give equal plans, on every rank.

    Args:
        works: one a parameter, in any order.
        ranks: number of ranks, counted from 0.
        policy: what is balanced.
        divisions: how `GLOBAL` may share out one parameter. Batches are divided where that balances better. Peers step
            a parameter together where the whole step is shorter so, exchange included; of parameters that all ranks
            can own.
        model: weighs operations against exchanged bytes; None: the default one.
        most_memory: bytes of state of the fullest rank over their mean that `GLOBAL` stays below where it can.
        carried: what the ranks step besides; `BUCKET` and `GLOBAL` level the sum. The plan's own costs and bytes do not
            hold it.

    Raises:
        ShardingError: names occur twice, a work names a rank that is not there, or what is carried is of other ranks.

    Example:
        >>> works = [Work(name, cost, numel=1, state_bytes=8) for name, cost in (("a", 3.0), ("b", 2.0), ("c", 1.0))]
        >>> plan = plan_owners(works, 2)
        >>> {name: owners.ranks for name, owners in plan.owners.items()}, plan.compute_imbalance
        ({'a': (0,), 'b': (1,), 'c': (1,)}, 1.0)
    """
    _require_sound(works, ranks, carried)
    model = model or CostModel()
    if policy is OwnerPolicy.GLOBAL:
        # In the order of names: the plan does not depend on the order of what is given.
        by_name = sorted(works, key=lambda work: work.name)
        owners = plan_globally(by_name, ranks, frozenset(divisions), model, most_memory, carried)
    else:
        owners = _by_bucket(works, ranks, policy, carried)
    return plan_of(works, owners, ranks, model)


def _by_bucket(
    works: Sequence[Work], ranks: int, policy: OwnerPolicy, carried: Carried | None
) -> dict[str, Owners]:
    by_bucket: dict[int, list[Work]] = {}
    for work in works:
        by_bucket.setdefault(work.bucket, []).append(work)
    owners: dict[str, Owners] = {}
    loads = Loads(ranks, carried=carried)
    for _, some in sorted(by_bucket.items()):
        if policy is OwnerPolicy.ELEMENTS:
            places = pack(whole_units(some, by=lambda work: float(work.numel)), Loads(ranks))
        else:
            places = pack(whole_units(some, by=lambda work: work.cost), loads)
        owners.update((work.name, Owners((rank,))) for work, rank in zip(some, places, strict=True))
    return owners


def _require_sound(works: Sequence[Work], ranks: int, carried: Carried | None) -> None:
    if ranks < 1:
        raise ShardingError(f"plan_owners: {ranks} ranks; there is at least 1")
    if carried is not None and {len(carried.costs), len(carried.state_bytes)} != {ranks}:
        raise ShardingError(
            f"plan_owners: carried has {len(carried.costs)} costs and {len(carried.state_bytes)} state_bytes; there "
            f"is one of each for {ranks} ranks"
        )
    seen: set[str] = set()
    for work in works:
        if work.name in seen:
            raise ShardingError(f"plan_owners: two works are called {work.name!r}")
        seen.add(work.name)
        if work.ranks is not None and (work.ranks[0] < 0 or work.ranks[-1] >= ranks):
            raise ShardingError(
                f"plan_owners: {work.name!r} names the ranks {work.ranks}; there are 0 to {ranks - 1}"
            )
