"""Ranks that hold different parameters end with the same optimizers and groups, and fail together."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from megaopt_testing import temporary_plugin
from torch import nn

from megaopt_core import (
    OptimizerConfig,
    OptimizerEntry,
    ParamKey,
    ProcessGroupCollection,
    Role,
    build_optimizer,
    hookimpl,
    route,
)
from megaopt_core.errors import MegaoptError
from megaopt_core.params import MATRIX, ParamSpec
from megaopt_core.plugin_api import StoredParam, StoredRouting
from megaopt_core.sharding import Replicated, ShardingStrategy

pytestmark = [pytest.mark.any_python, pytest.mark.distributed]


class TwoKinds:
    """Optimizer `whole` takes matrices and leaves the rest to `plain`."""

    megaopt_api = "1"

    @hookimpl
    def megaopt_optimizer_entries(self) -> dict[str, OptimizerEntry]:
        """Return both."""
        return {
            "plain": OptimizerEntry(torch.optim.SGD),
            "whole": OptimizerEntry(
                torch.optim.SGD,
                granularity="tensor",
                accepts=lambda spec, view: None if view is not None else "no matrix",
                fallback="plain",
            ),
        }


def stage(rank: int, size: int) -> nn.ModuleDict:
    """One pipeline stage: the first has the embedding, the last the head, the second an expert."""
    torch.manual_seed(0)
    parts = {f"layer{rank}": torch.nn.Linear(4, 4)}
    for layer in list(parts.values()):
        layer.weight.matrix_view = MATRIX
    if rank == 0:
        parts = {"embed": torch.nn.Embedding(8, 4), **parts}
    if rank == 1:
        parts["expert"] = torch.nn.Linear(4, 4, bias=False)
        parts["expert"].weight.allreduce, parts["expert"].weight.matrix_view = False, MATRIX
    if rank == size - 1:
        parts["norm"], parts["head"] = torch.nn.LayerNorm(4), torch.nn.Linear(4, 8, bias=False)
    return torch.nn.ModuleDict(parts)


OVERRIDES = {
    ParamKey(name="layer0.weight"): {"max_lr": 0.5},
    ParamKey(name="layer1.bias"): {"wd_mult": 0.0, "momentum": 0.5},
    ParamKey(name="head.*"): {"optimizer": "plain", "nesterov": True, "momentum": 0.5},
}


def stages() -> ProcessGroupCollection:
    """Return the process groups of a pipeline of all ranks."""
    return ProcessGroupCollection(pp=dist.group.WORLD)


def routed(rank: int, size: int) -> tuple[tuple[Any, ...], list[str], list[int]]:
    """Return what every rank must agree on, and what differs."""
    pgs = stages()
    with temporary_plugin(TwoKinds(), name="two-kinds"):
        routing = route(OptimizerConfig(optimizer="whole", lr=0.1), stage(rank, size), OVERRIDES, pgs)
        optimizer = build_optimizer(
            stage(rank, size), "whole", lr=0.1, overrides=OVERRIDES, pg_collection=pgs
        )
        for param in optimizer.get_parameters():
            param.grad = torch.ones_like(param)
        outcome = optimizer.step()
    shared = (
        [
            (child.optimizer, child.is_expert, dict(child.settings), child.groups)
            for child in routing.children
        ],
        [group.key for group in routing.groups],
        [sorted(set(group) - {"params"}) for group in optimizer.param_groups],
        outcome.update_successful,
    )
    return shared, sorted(routing.params), [len(group["params"]) for group in optimizer.param_groups]


@pytest.mark.parametrize("size", [2, 4])
def test_stages_agree_on_optimizers_and_groups(launch, size):
    """Every rank holds every group, some of them empty, and all ranks step."""
    results = launch(routed, size)
    assert all(shared == results[0][0] for shared, _, _ in results)
    assert len({tuple(names) for _, names, _ in results}) == size
    for _, names, counts in results:
        assert sum(counts) == len(names)
        assert 0 in counts


def fails(rank: int, size: int, kind: str) -> tuple[str, str] | None:
    """Route with a mistake and return the message."""
    overrides = {
        "pattern": {ParamKey(name="layer9.*"): {"max_lr": 1.0}},
        "one rank": {ParamKey(name="expert.*"): {"unknown_setting": 1.0}},
    }[kind]
    with temporary_plugin(TwoKinds(), name="two-kinds"):
        try:
            route(OptimizerConfig(optimizer="whole", lr=0.1), stage(rank, size), overrides, stages())
        except MegaoptError as error:
            return type(error).__name__, str(error)
    return None


def test_a_pattern_that_matches_nowhere_fails_everywhere(launch):
    """A pattern that matches on one rank is fine for all; one that matches on none is an error on all."""
    for name, message in launch(fails, 2, "pattern"):
        assert name == "UnmatchedKeyError"
        assert "'layer9.*' matches no parameter on any rank" in message


def test_an_error_on_one_rank_is_raised_on_all(launch):
    """Rank 1 knows what is wrong; rank 0 hears of it instead of waiting."""
    (other, told), (own, message) = launch(fails, 2, "one rank")
    assert own == "OverrideError"
    assert "'unknown_setting' is no setting of optimizer 'whole', which steps 'expert.weight'" in message
    assert other == "RoutingError"
    assert told == f"rank 1 cannot route its parameters: OverrideError: {message}"


def idle(rank: int, size: int, excused: bool) -> tuple[str, str] | None:
    """Build an optimizer for matrices where no rank is sure of one, and return the message."""
    part = (
        nn.ModuleDict({f"layer{rank}": nn.Linear(8, 8)}) if rank else nn.ModuleDict({"norm": nn.LayerNorm(8)})
    )
    overrides = {ParamKey(name="layer1.weight"): {"optimizer": "plain"}} if excused else {}
    with temporary_plugin(TwoKinds(), name="two-kinds"):
        try:
            build_optimizer(part, "whole", lr=0.1, overrides=overrides, pg_collection=stages())
        except MegaoptError as error:
            return type(error).__name__, str(error)
    return None


@pytest.mark.parametrize(("size", "excused"), [(2, False), (4, True), (4, False)])
def test_an_optimizer_for_matrices_that_steps_none_is_refused_on_all_ranks(launch, size, excused):
    """Where a rank has no weight, or an override for all that it has, it hears of the others."""
    results = launch(idle, size, excused)
    assert all(name == "RoutingError" for name, _ in results)
    assert all("'whole' would step nothing on any rank" in message for _, message in results)


class Picky(Replicated):
    """Takes no expert."""

    def refuse(self, param: nn.Parameter, spec: ParamSpec) -> str | None:
        """Return why a parameter cannot be sharded."""
        return "experts are not taken" if spec.is_expert else None


class PickyPlugin(TwoKinds):
    @hookimpl
    def megaopt_sharding_strategies(self) -> dict[str, ShardingStrategy]:
        """Return the strategy."""
        return {"picky": Picky("picky")}


def refused(rank: int, size: int) -> str:
    """Build with a strategy that refuses what rank 1 alone holds, and return the message."""
    with temporary_plugin(PickyPlugin(), name="picky"), pytest.raises(MegaoptError) as raised:
        build_optimizer(stage(rank, size), "plain", lr=0.1, sharding="picky", pg_collection=stages())
    return str(raised.value)


def test_what_a_strategy_refuses_on_one_rank_is_refused_on_all(launch):
    """Rank 0 holds nothing that it would refuse."""
    own = "sharding='picky' cannot take 'expert.weight': experts are not taken"
    assert launch(refused, 2) == [f"rank 1 cannot route its parameters: ShardingError: {own}", own]


def followed(rank: int, size: int) -> tuple[dict[str, str], str]:
    """Follow one routing of all stages, then one that another rank has otherwise."""
    names = [name for each in range(size) for name, _ in stage(each, size).named_parameters()]
    params = {
        name: StoredParam("whole" if "head" in name else "plain", Role.MATRIX, MATRIX) for name in names
    }
    config = OptimizerConfig(optimizer="whole", lr=0.1)
    with temporary_plugin(TwoKinds(), name="two-kinds"):
        routing = route(config, stage(rank, size), None, stages(), routing=StoredRouting("run", params))
        changed = {**params, "layer0.bias": StoredParam("whole" if rank else "plain", Role.MATRIX, MATRIX)}
        try:
            route(config, stage(rank, size), None, stages(), routing=StoredRouting("run", changed))
        except MegaoptError as error:
            told = str(error)
    return {name: entry.spec.optimizer for name, entry in routing.params.items()}, told


def test_stages_follow_one_stored_routing(launch):
    """Each finds its own parameters in it; ranks that read different ones all raise."""
    results = launch(followed, 2)
    assert results[0][0] == dict.fromkeys(["embed.weight", "layer0.weight", "layer0.bias"], "plain")
    assert results[1][0]["head.weight"] == "whole"
    assert all("the ranks follow different routings" in told for _, told in results)
