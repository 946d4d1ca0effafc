"""Where owners stand along the axes that share optimizers out: dense and expert matrices are levelled together."""

from __future__ import annotations

from collections.abc import Sequence

from attrs import define, field

from megaopt_core.sharding import World
from megaopt_layerwise.planner import Carried, OwnerPlan, Work, plan_owners

__all__ = ["ExpertPlaces", "plan_dense_first"]


@define(eq=False)
class ExpertPlaces:
    """Where the owners of experts stand, and what that leaves for dense matrices.

    Few ranks can own an expert, so that experts come first; dense matrices then fill up what is less loaded. This needs
    the experts of all ranks.

    Args:
        works: at each place along `ep`, and there at each along `expert_tp`, the experts.
        world: number of ranks along each axis.

    Example:
        >>> one, other = (Work(name, 1.0, numel=1, state_bytes=8) for name in ("one", "other"))
        >>> experts = ExpertPlaces([[one], [other]], World({"dp": 4, "expert_dp": 2, "ep": 2}))
        >>> experts.at(1), experts.plan_dense([Work("dense", 2.0, numel=1, state_bytes=8)])
        ({'other': 0}, {'dense': 2})
    """

    works: Sequence[Sequence[Work]]
    world: World
    _plans: Sequence[OwnerPlan] = field(init=False)
    _carried: Carried | None = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._plans = [plan_owners(some, self.world.size("expert_dp")) for some in self.works]
        costs = self._at_dense_places([plan.costs for plan in self._plans])
        state = self._at_dense_places([plan.state_bytes for plan in self._plans])
        self._carried = None if costs is None or state is None else Carried(costs, state)

    def at(self, place: int) -> dict[str, int]:
        """Return the places of owners along `expert_dp`.

        Args:
            place: position in `works`.
        """
        return _places(self._plans[place])

    def plan_dense(self, works: Sequence[Work]) -> dict[str, int]:
        """Return the places of the owners of dense matrices along `dp`.

        Args:
            works: the matrices.
        """
        return _places(plan_owners(works, self.world.size("dp"), carried=self._carried))

    def _at_dense_places(self, values: Sequence[Sequence[float]]) -> list[float] | None:
        """Return the mean over the ranks at each place along `dp` of what each rank has of experts.

        Ranks are counted with the tensor-parallel ones next to each other, then those along `ep`. Where a world is
        arranged otherwise the plan is as valid, and less level. None where the axes do not have the same ranks.
        """
        among, places = self.world.size("tp"), self.world.size("dp")
        if places * among != self.world.size("expert_dp") * len(values):
            return None
        found = [0.0] * places
        for rank in range(places * among):
            shard, place = divmod(rank, len(values))
            found[rank // among] += values[place][shard] / among
        return found


def plan_dense_first(dense: Sequence[Work], experts: Sequence[Work], world: World) -> dict[str, int]:
    """Return the places of owners along `dp` and `expert_dp`, for a rank that knows its own experts alone.

    Ranks with other experts have the same dense matrices, and must find the same owners of these.

    Args:
        dense: the dense matrices.
        experts: the experts at this rank's place along `ep`.
        world: number of ranks along each axis.

    Example:
        >>> dense, expert = (Work(name, 1.0, numel=1, state_bytes=8) for name in ("dense", "expert"))
        >>> plan_dense_first([dense], [expert], World({"dp": 2, "expert_dp": 2}))
        {'dense': 0, 'expert': 1}
    """
    plan = plan_owners(dense, world.size("dp"))
    ranks = world.size("expert_dp")
    among = world.size("dp") // ranks
    carried = None
    if among * ranks == world.size("dp"):
        costs, state = (
            [sum(values[at * among : (at + 1) * among]) / among for at in range(ranks)]
            for values in (plan.costs, plan.state_bytes)
        )
        carried = Carried(costs, state)
    return _places(plan) | _places(plan_owners(experts, ranks, carried=carried))


def _places(plan: OwnerPlan) -> dict[str, int]:
    return {name: owners.ranks[0] for name, owners in plan.owners.items()}
