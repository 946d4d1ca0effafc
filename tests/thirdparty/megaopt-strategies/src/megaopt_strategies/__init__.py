"""Sharding strategies for megaopt, written by what its documentation says alone."""

from megaopt_core import OptimizerEntry, hookimpl
from megaopt_core.sharding import ShardingStrategy
from megaopt_strategies.experts import ByExpert
from megaopt_strategies.normed import NormedSGD
from megaopt_strategies.pairs import Pairs
from megaopt_strategies.parts import Parts
from megaopt_strategies.round_robin import RoundRobin
from megaopt_strategies.row_blocks import RowBlocks

megaopt_api = "1"


@hookimpl
def megaopt_sharding_strategies() -> dict[str, ShardingStrategy]:
    """Offer every strategy of this package."""
    return {strategy.name: strategy for strategy in (RoundRobin(), RowBlocks(), ByExpert(), Pairs(), Parts())}


@hookimpl
def megaopt_optimizer_entries() -> dict[str, OptimizerEntry]:
    """Offer an optimizer of whole tensors that several ranks may step together."""
    about = "every tensor moves by the learning rate, against its gradient"
    entry = OptimizerEntry(NormedSGD, state={}, granularity="tensor", supports_peers=True, description=about)
    return {"normed_sgd": entry}
