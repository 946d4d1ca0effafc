"""The optimizer finds megaopt's wrapper wherever it is: inside of what it is given, or around it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from megaopt_distributed import DistributedDataParallel, DistributedDataParallelConfig, plan_full_param_layout
from torch import nn

from megaopt_core import (
    OptimizerConfig,
    ProcessGroupCollection,
    build_optimizer,
    get_megatron_optimizer,
    route,
)
from megaopt_core.errors import MegaoptError
from megaopt_core.optimizers import FP32Optimizer, MegatronOptimizer

pytestmark = [pytest.mark.any_python, pytest.mark.distributed]

WHOLE: dict = {}
SCATTERED = {"use_distributed_optimizer": True}
OVERLAPPED = {
    **SCATTERED,
    "overlap_grad_reduce": True,
    "overlap_param_gather": True,
    "bucket_size": 40,
}
WHOLE_KINDS = [(WHOLE, None), (WHOLE, "distributed"), (WHOLE, "layer_wise")]
SCATTERED_KINDS = [(SCATTERED, "distributed"), (SCATTERED, "layer_wise"), (OVERLAPPED, "distributed")]


def network() -> nn.Module:
    """Return the same layers on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))


def wrap(module: nn.Module, settings: dict) -> DistributedDataParallel:
    """Return the module in megaopt's wrapper."""
    return DistributedDataParallel(module, DistributedDataParallelConfig(**settings))


def build(model: nn.Module, settings: dict, sharding: str | None) -> MegatronOptimizer:
    """Return an optimizer that clips, so that gradients of all ranks matter to each."""
    overlaps = settings.get("overlap_param_gather", False)
    return build_optimizer(
        model, "adam", lr=0.1, sharding=sharding, clip_grad=0.5, overlap_param_gather=overlaps
    )


def trained(
    optimizer: MegatronOptimizer, model: nn.Module, wrapper: DistributedDataParallel, rank: int
) -> list:
    """Train for a few steps, and return the values and the norms."""
    norms = []
    for step in range(3):
        for part in range(2):
            inputs = torch.full((2, 8), 1.0 + rank + part) * torch.linspace(-1, 1, 8) + step
            model(inputs).square().mean().backward()
        norms.append(torch.tensor(optimizer.step().grad_norm))
        optimizer.zero_grad()
    wrapper.finish_param_sync()
    return [*(param.detach().clone() for param in wrapper.module.parameters()), *norms]


class Holder(nn.Module):
    """Holds a wrapper under a name of its own."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Call it."""
        return self.inner(inputs)


def same(one: list, other: list) -> bool:
    """Return whether all values are equal, bit for bit."""
    return all(torch.equal(*pair) for pair in zip(one, other, strict=True))


ARRANGEMENTS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "held": lambda wrapper: nn.Sequential(Holder(wrapper)),
    "bare": lambda wrapper: wrapper.module,
    "compiled": lambda wrapper: torch.compile(wrapper, backend="eager"),
}


def differing(rank: int, size: int, kinds: list[tuple], names: list[str]) -> list[tuple]:
    """Return which arrangements train otherwise than the wrapper alone."""
    found = []
    for settings, sharding in kinds:
        wrapper = wrap(network(), settings)
        expected = trained(build(wrapper, settings, sharding), wrapper, wrapper, rank)
        for name in names:
            module = network()
            if name == "wrapped afterwards":
                optimizer = build(module, settings, sharding)
                wrapper = run = wrap(module, settings)
            else:
                wrapper = wrap(module, settings)
                given = ARRANGEMENTS[name](wrapper)
                optimizer = build(given, settings, sharding)
                run = wrapper if name == "bare" else given
            if not same(trained(optimizer, run, wrapper, rank), expected):
                found.append((name, settings, sharding))
    return found


@pytest.mark.parametrize(
    ("kinds", "names"),
    [
        (WHOLE_KINDS, ["held", "bare", "wrapped afterwards"]),
        (SCATTERED_KINDS, ["held", "bare"]),
        ([(WHOLE, None), (OVERLAPPED, "distributed")], ["compiled"]),
    ],
    ids=["whole", "scattered", "compiled"],
)
def test_a_hidden_wrapper_is_as_good_as_one_that_is_given(launch, kinds, names):
    """Gradients are reduced, parameters gathered and buffers zeroed, in every arrangement and under every strategy."""
    assert launch(differing, 2, kinds, names) == [[], []]


@contextmanager
def told(found: list[str]) -> Iterator[None]:
    """Note which error is raised, and how it begins."""
    try:
        yield
        found.append("nothing")
    except MegaoptError as error:
        found.append(f"{type(error).__name__}: {error}"[:60])


def refusals(rank: int, size: int) -> list[str]:
    """Return the errors of arrangements that cannot work."""
    found: list[str] = []
    inputs = torch.ones(2, 8) * (1 + rank)
    for sharding in (None, "distributed", "layer_wise"):
        module = network()
        optimizer = build(module, WHOLE, sharding)
        wrapper = wrap(module, SCATTERED)
        for _ in range(2):
            wrapper(inputs).sum().backward()
            with told(found):
                optimizer.step()
            wrapper.zero_grad_buffer()
    wrapper = wrap(network(), SCATTERED)
    optimizer = build(wrapper, SCATTERED, "distributed")
    again = wrap(wrapper.module, WHOLE)
    again(inputs).sum().backward()
    with told(found):
        optimizer.step()
    with told(found):
        build(Holder(wrap(network(), SCATTERED)), WHOLE, None)
    wrapper = wrap(network(), OVERLAPPED)
    with told(found):
        build(wrapper.module, WHOLE, "distributed")
    with told(found):
        build(Holder(nn.ModuleList([wrap(network(), SCATTERED) for _ in range(2)])), SCATTERED, "distributed")
    wrapper = wrap(network(), SCATTERED)
    with told(found):
        build(wrapper.module[0], SCATTERED, "distributed")
    alone = [dist.new_group([0]), dist.new_group([1])]
    module = network()
    optimizer = build(module, WHOLE, None)
    wrapper = DistributedDataParallel(module, pg_collection=ProcessGroupCollection(dp=alone[rank]))
    wrapper(inputs).sum().backward()
    with told(found):
        optimizer.step()
    module = network()
    by_hand = FP32Optimizer(torch.optim.SGD(module.parameters(), lr=0.1), OptimizerConfig())
    wrapper = wrap(module, SCATTERED)
    wrapper(inputs).sum().backward()
    with told(found):
        by_hand.step()
    return found


def test_what_cannot_work_is_refused(launch):
    """On all ranks, before anything is stepped, and again in the next step."""
    late = "OwnershipError: model chunk 0 was wrapped in DistributedDataParallel after the optimizer"[:60]
    beginnings = [
        *[late] * 7,
        "ShardingError: sharding='replicated' needs whole gradients",
        "ConfigurationError: overlap_param_gather=False, but model",
        "ShardingError: 2 wrappers reduce gradients of model chunk 0",
        "ShardingError: DistributedDataParallel shares out gradients",
        "ParallelGroupError: model chunk 0 is wrapped over other ranks",
        "UnsupportedOperationError: DistributedDataParallel scatters",
    ]
    for found in launch(refusals, 2):
        assert [told.startswith(start[:60]) for told, start in zip(found, beginnings, strict=True)] == (
            [True] * len(beginnings)
        ), found


def wrapped_by_hand(rank: int, size: int) -> list[str]:
    """Return which optimizers step unreduced gradients, among those that are made without the wrapper."""
    found = []
    config = OptimizerConfig(clip_grad=0.0)
    module = network()
    by_hand = FP32Optimizer(torch.optim.SGD(module.parameters(), lr=0.1), config)
    if differ_after_steps(by_hand, wrap(module, WHOLE), rank):
        found.append("FP32Optimizer")
    module, settings = network(), DistributedDataParallelConfig(**SCATTERED)
    config = OptimizerConfig(optimizer="adam", sharding="layer_wise", lr=0.1)
    layout = plan_full_param_layout(module, settings, routing=route(config, [module]))
    wrapper = DistributedDataParallel(module, settings, full_param_layout=layout)
    if differ_after_steps(get_megatron_optimizer(config, [Holder(wrapper)]), wrapper, rank):
        found.append("planned layout")
    module = network()
    wrapper = wrap(module, WHOLE)
    halves = [build_optimizer(module[at], "adam", lr=0.1) for at in (0, 2)]
    if differ_after_steps(halves[0], wrapper, rank, halves[1]):
        found.append("halves")
    return found


def differ_after_steps(
    optimizer: MegatronOptimizer, wrapper: nn.Module, rank: int, other: MegatronOptimizer | None = None
) -> bool:
    """Train, and return whether ranks differ, or parameters have not moved."""
    before = [param.detach().clone() for param in wrapper.parameters()]
    for _ in range(2):
        wrapper(torch.linspace(-1, 1, 8) * (1.0 + rank)).square().sum().backward()
        for one in (optimizer, other):
            if one is not None:
                one.step()
                one.zero_grad()
    wrapper.finish_param_sync()
    mine = [param.detach().clone() for param in wrapper.parameters()]
    first = [param.clone() for param in mine]
    for value in first:
        dist.broadcast(value, 0)
    differs = torch.tensor(float(not same(mine, first) or any(map(torch.equal, mine, before))))
    dist.all_reduce(differs)
    return bool(differs)


def test_optimizers_that_know_parameters_only_wait_for_the_wrapper(launch):
    """Their parameters say who reduces gradients; of two optimizers of one wrapper, one leaves the other's alone."""
    assert launch(wrapped_by_hand, 2) == [[], []]


def retried(rank: int, size: int) -> list[list[str]]:
    """Return what a step says when it is made again with gradients that the check has refused."""
    runs = []
    for settings, sharding in ((WHOLE, None), (SCATTERED, "distributed"), (OVERLAPPED, "distributed")):
        wrapper = wrap(network(), {**settings, "check_for_nan_in_grad": True})
        optimizer = build(wrapper, settings, sharding)
        found: list[str] = []
        scale = float("nan") if rank == 1 else 1.0
        wrapper(torch.ones(2, 8)).sum().mul(scale).backward()
        for attempt in range(4):
            if attempt == 2:
                wrapper.finish_param_sync()
                wrapper._grads.scale(0.5)
            with told(found):
                optimizer.step() if attempt < 3 else wrapper.finish_grad_sync()
        optimizer.zero_grad()
        wrapper(torch.ones(2, 8)).sum().backward()
        with told(found):
            optimizer.step()
        wrapper.finish_param_sync()
        finite = all(bool(torch.isfinite(param).all()) for param in wrapper.parameters())
        runs.append([*(told.split("'")[0] for told in found), str(finite)])
    return runs


def test_refused_gradients_are_refused_until_they_are_zeroed(launch):
    """On all ranks, also where another rank's gradient is the one that is not finite."""
    expected = [*["GradientError: gradients are not finite: "] * 4, "nothing", "True"]
    assert launch(retried, 2) == [[expected] * 3] * 2
