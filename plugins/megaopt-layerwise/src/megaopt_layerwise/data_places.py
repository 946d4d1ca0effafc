"""Where owners stand along the axes that share optimizers out: dense and expert matrices are levelled together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from attrs import define, field

from megaopt_core.sharding import World
from megaopt_layerwise.planner import Carried, CostModel, Division, OwnerPlan, Owners, Work, plan_owners

__all__ = ["DataPlaces", "divisions_of", "plan_dense_first"]

_ROUNDS = 3
"""How often each kind is planned again over what the other kind has left unequal."""


def divisions_of(works: Sequence[Work]) -> frozenset[Division]:
    """Return how works may be shared out: peers that nobody has forbidden, and matrices of batches that may go apart.

    Args:
        works: what is shared out.
    """
    found = {Division.WHOLE}
    if any(work.matrices > 1 for work in works):
        found.add(Division.MATRICES)
    if any(work.most_peers > 1 and work.asked_peers != 1 for work in works):
        found.add(Division.PEERS)
    return frozenset(found)


@define(eq=False)
class DataPlaces:
    """Where the owners of dense matrices and of experts stand, from one picture of what every rank has to do.

    The owners of each kind are planned over what the other kind loads on the same ranks, the kinds in turn, for as long
    as that makes the fullest rank less full: first experts, which few ranks can own, and then dense matrices over what
    they leave unequal, and the other way round. This needs the experts of all ranks.

    Args:
        dense: the dense matrices.
        experts: at each place along `ep`, and there at each along `expert_tp`, the experts.
        world: number of ranks along each axis.
        model: weighs operations against exchanged bytes.

    Example:
        >>> one, other = (Work(name, 1.0, numel=1, state_bytes=8) for name in ("one", "other"))
        >>> dense = Work("dense", 2.0, numel=1, state_bytes=8)
        >>> places = DataPlaces([dense], [[one], [other]], World({"dp": 4, "expert_dp": 2, "ep": 2}))
        >>> {name: owners.ranks for name, owners in places.at(1).items()}
        {'dense': (2,), 'other': (0,)}
    """

    dense: Sequence[Work]
    experts: Sequence[Sequence[Work]]
    world: World
    model: CostModel = field(factory=CostModel)
    _dense_plan: OwnerPlan = field(init=False)
    _expert_plans: Sequence[OwnerPlan] = field(init=False)

    def __attrs_post_init__(self) -> None:
        if not self._is_one_world:
            self._dense_plan, self._expert_plans = self._plan_dense(None), self._plan_experts(None)
            return
        candidates = []
        for dense_first in (False, True):
            found = self._from(dense_first=dense_first)
            candidates.append((self._fullest(*found), dense_first, found))
            if not self.dense or not any(self.experts):
                break
        _, _, (self._dense_plan, self._expert_plans) = min(candidates, key=lambda entry: entry[:2])

    def at(self, place: int) -> dict[str, Owners]:
        """Return the owners along `dp` and `expert_dp`.

        Args:
            place: position in `experts`.
        """
        return {**self._dense_plan.owners, **self._expert_plans[place].owners}

    @property
    def _is_one_world(self) -> bool:
        """Whether the axes of both kinds have the same ranks."""
        dense, experts = self.world.size("dp") * self.world.size("tp"), self.world.size("expert_dp")
        return dense == experts * len(self.experts)

    def _from(self, *, dense_first: bool) -> tuple[OwnerPlan, Sequence[OwnerPlan]]:
        """Return plans that begin with one kind."""
        dense = self._plan_dense(None) if dense_first else None
        experts = self._plan_experts(dense)
        found = self._plan_dense(experts), experts
        for _ in range(_ROUNDS if self.dense and any(self.experts) else 0):
            again = self._plan_experts(found[0])
            next_one = self._plan_dense(again), again
            if self._fullest(*next_one) >= self._fullest(*found) * (1 - 1e-9):
                break
            found = next_one
        return found

    def _plan_dense(self, experts: Sequence[OwnerPlan] | None) -> OwnerPlan:
        carried = None
        if experts is not None:
            costs, state = ([plan.costs for plan in experts], [plan.state_bytes for plan in experts])
            carried = Carried(self._at_dense_places(costs), self._at_dense_places(state))
        return self._plan(self.dense, "dp", carried)

    def _plan_experts(self, dense: OwnerPlan | None) -> list[OwnerPlan]:
        return [
            self._plan(some, "expert_dp", None if dense is None else self._of_dense(dense, place))
            for place, some in enumerate(self.experts)
        ]

    def _plan(self, works: Sequence[Work], axis: str, carried: Carried | None) -> OwnerPlan:
        return plan_owners(
            works, self.world.size(axis), divisions=divisions_of(works), model=self.model, carried=carried
        )

    def _at_dense_places(self, values: Sequence[Sequence[float]]) -> list[float]:
        """Return the mean over the ranks at each place along `dp` of what each rank has of experts.

        Ranks are counted with the tensor-parallel ones next to each other, then those along `ep`. Where a world is
        arranged otherwise the plan is as valid, and less level.
        """
        among = self.world.size("tp")
        found = [0.0] * self.world.size("dp")
        for rank in range(len(found) * among):
            shard, place = divmod(rank, len(values))
            found[rank // among] += values[place][shard] / among
        return found

    def _of_dense(self, dense: OwnerPlan, place: int) -> Carried:
        """Return what the ranks at one place of the experts have of dense matrices."""
        among = self.world.size("tp")
        ranks = [
            (shard * len(self.experts) + place) // among for shard in range(self.world.size("expert_dp"))
        ]
        return Carried([dense.costs[rank] for rank in ranks], [dense.state_bytes[rank] for rank in ranks])

    def _fullest(self, dense: OwnerPlan, experts: Sequence[OwnerPlan]) -> float:
        among = self.world.size("tp")
        return max(
            dense.costs[rank // among] + experts[rank % len(experts)].costs[rank // len(experts)]
            for rank in range(self.world.size("dp") * among)
        )


def plan_dense_first(
    dense: Sequence[Work], experts: Sequence[Work], world: World, model: CostModel | None = None
) -> Mapping[str, Owners]:
    """Return the owners along `dp` and `expert_dp`, for a rank that knows its own experts alone.

    Ranks with other experts have the same dense matrices, and must find the same owners of these.

    Args:
        dense: the dense matrices.
        experts: the experts at this rank's place along `ep`.
        world: number of ranks along each axis.
        model: weighs operations against exchanged bytes; None: the default one.

    Example:
        >>> dense, expert = (Work(name, 1.0, numel=1, state_bytes=8) for name in ("dense", "expert"))
        >>> owners = plan_dense_first([dense], [expert], World({"dp": 2, "expert_dp": 2}))
        >>> {name: each.ranks for name, each in owners.items()}
        {'dense': (0,), 'expert': (1,)}
    """
    plan = plan_owners(dense, world.size("dp"), divisions=divisions_of(dense), model=model)
    ranks = world.size("expert_dp")
    among = world.size("dp") // ranks
    carried = None
    if among * ranks == world.size("dp"):
        costs, state = (
            [sum(values[at * among : (at + 1) * among]) / among for at in range(ranks)]
            for values in (plan.costs, plan.state_bytes)
        )
        carried = Carried(costs, state)
    after = plan_owners(experts, ranks, divisions=divisions_of(experts), model=model, carried=carried)
    return {**plan.owners, **after.owners}
