"""Process groups that a plugin gives for a model whose trainer keeps them."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from megaopt_testing.plugins import temporary_plugin
from torch.testing._internal.distributed.fake_pg import FakeStore

from megaopt_core import OptimizerConfig, ProcessGroupCollection, build_optimizer, hookimpl, route
from megaopt_core.errors import ParallelGroupError, PluginHookError


class Keeper:
    """A trainer that keeps groups."""

    megaopt_api = "1"

    def __init__(self, answer: object) -> None:
        self.answer, self.asked = answer, 0

    @hookimpl
    def megaopt_process_groups(self, model_chunks: list) -> object:
        self.asked += 1
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


@pytest.fixture
def tensor_parallel() -> Iterator[ProcessGroupCollection]:
    """Tensor parallelism over eight ranks, of which this process plays the fourth and hears no other."""
    dist.init_process_group("fake", rank=3, world_size=8, store=FakeStore())
    try:
        yield ProcessGroupCollection(tp=dist.new_group(list(range(8))))
    finally:
        dist.destroy_process_group()


def model() -> torch.nn.Module:
    """Return a model of one layer."""
    return torch.nn.Linear(4, 2)


def test_groups_of_a_plugin_hold_where_the_caller_gives_none(tensor_parallel) -> None:
    """A build asks once; groups that are passed are the caller's; None leaves the default group."""
    config = OptimizerConfig(optimizer="plain", lr=1e-3)
    keeper, other = Keeper(tensor_parallel), Keeper(None)
    with temporary_plugin(keeper, name="keeper"), temporary_plugin(other, name="other"):
        assert route(config, model()).axes["tp"] == 8
        keeper.asked = 0
        assert build_optimizer(model(), "plain", lr=1e-3).routing.axes["tp"] == 8
        assert keeper.asked == 1
        assert route(config, model(), None, ProcessGroupCollection()).axes["tp"] == 1
        assert keeper.asked == 1
    with temporary_plugin(other, name="other"):
        assert dict(route(config, model()).axes) | {"tp": 8, "dp": 1} != dict(route(config, model()).axes)
        assert route(config, model()).axes["dp"] == 8


def test_two_plugins_that_give_equal_groups_are_no_error(tensor_parallel) -> None:
    """Groups are equal where their ranks are."""
    again = {"tp": dist.new_group(list(range(8)))}
    with temporary_plugin(Keeper(tensor_parallel), name="a"), temporary_plugin(Keeper(again), name="b"):
        assert route(OptimizerConfig(optimizer="plain", lr=1e-3), model()).axes["tp"] == 8


def test_two_plugins_that_give_different_groups_are_an_error(tensor_parallel) -> None:
    """The error names both, the group and its ranks."""
    pairs = {"tp": dist.new_group([2, 3])}
    with (
        temporary_plugin(Keeper(tensor_parallel), name="a"),
        temporary_plugin(Keeper(pairs), name="b"),
        pytest.raises(
            ParallelGroupError, match=r"'a'.* and .*'b'.* different .*: tp is \[0, 1.*\] and \[2, 3\]"
        ),
    ):
        route(OptimizerConfig(optimizer="plain", lr=1e-3), model())


@pytest.mark.parametrize(
    ("answer", "error", "message"),
    [
        (ZeroDivisionError("oops"), PluginHookError, r"'keeper'.*megaopt_process_groups: ZeroDivisionError"),
        (ParallelGroupError("no group of stages"), ParallelGroupError, r"^no group of stages$"),
        ({"axis": None}, ParallelGroupError, r"'keeper'.*returned: unknown process groups \['axis'\]"),
        ("dp", ParallelGroupError, r"'keeper'.*returned: pg_collection='dp' is no ProcessGroupCollection"),
    ],
)
def test_a_plugin_that_fails_stops_the_build(answer, error, message) -> None:
    """Ranks of a model that is divided would else be taken for replicas."""
    with temporary_plugin(Keeper(answer), name="keeper"), pytest.raises(error, match=message):
        build_optimizer(model(), "plain", lr=1e-3)
