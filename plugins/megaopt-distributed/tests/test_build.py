"""Building with the strategy in a single process: what it takes, what it refuses."""

import importlib.util
from typing import Any

import pytest
import torch
from megaopt_distributed import DistributedDataParallel, DistributedDataParallelConfig, plan_full_param_layout
from megaopt_distributed.buffers.bucket import Bucket, Reduction
from megaopt_distributed.buffers.collectives import communicator
from megaopt_distributed.gathering import GatheredBucket, Gathering
from megaopt_testing.plugins import temporary_plugin
from torch import nn

from megaopt_core import (
    Granularity,
    OptimizerConfig,
    OptimizerEntry,
    build_optimizer,
    get_megatron_optimizer,
    hookimpl,
    route,
)
from megaopt_core.errors import (
    ConfigurationError,
    OwnershipError,
    PluginNotInstalledError,
    RoutingChangedError,
    ShardingError,
)
from megaopt_core.sharding import BufferKey, Replicated

needs_adam = pytest.mark.skipif(importlib.util.find_spec("megaopt_adam") is None, reason="steps with adam")
SHARDED = DistributedDataParallelConfig(use_distributed_optimizer=True)
SHARDED_IN_TWO = DistributedDataParallelConfig(
    use_distributed_optimizer=True, overlap_grad_reduce=True, bucket_size=65
)


def model_of() -> nn.Module:
    """Return two layers."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 4))


@needs_adam
def test_one_rank_steps_like_a_replicated_optimizer() -> None:
    """Without torch.distributed there is one shard; neighbours are stepped as one tensor."""
    plain, wrapped = model_of(), DistributedDataParallel(model_of(), SHARDED)
    expected = build_optimizer(plain, "adam", lr=1e-2)
    actual = build_optimizer(wrapped, "adam", lr=1e-2, sharding="distributed")
    for _ in range(3):
        for model, optimizer in ((plain, expected), (wrapped, actual)):
            optimizer.zero_grad()
            model(torch.ones(2, 16)).square().sum().backward()
            optimizer.step()
    for one, other in zip(plain.parameters(), wrapped.parameters(), strict=True):
        assert torch.equal(one, other)


@needs_adam
def test_neighbours_are_one_tensor_for_the_inner_optimizer() -> None:
    """One call for neighbours of one group: parameters without padding between them are fused."""
    wrapped = DistributedDataParallel(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)), SHARDED)
    optimizer = build_optimizer(wrapped, "adam", overrides={}, lr=1e-2, sharding="distributed")
    assert [tensor.shape for tensor in optimizer.get_main_params()] == [(2 * (64 * 64 + 64),)]


@needs_adam
def test_parameters_of_the_same_memory_stay_together() -> None:
    """Tied by memory, not by object, and moved into memory of the optimizer's own."""
    first, second = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
    second.weight = nn.Parameter(first.weight.data)
    build_optimizer(nn.ModuleList([first, second]), "adam", lr=1e-2, sharding="distributed")
    assert first.weight.data_ptr() == second.weight.data_ptr()


@needs_adam
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_parameter_that_leaves_the_memory_is_named(dtype: torch.dtype) -> None:
    """A step would change memory that the model no longer reads."""
    model = model_of()
    optimizer = build_optimizer(model, "adam", lr=1e-2, sharding="distributed")
    model.to(dtype)
    model(torch.ones(2, 16, dtype=dtype)).sum().backward()
    with pytest.raises(OwnershipError, match=r"'1.bias'.* was float32 .* before you build its optimizer"):
        optimizer.step()


@needs_adam
def test_a_parameter_that_is_given_other_memory_returns() -> None:
    """The same shape, dtype and device elsewhere: its values come back to the memory that is stepped."""
    model = model_of()
    optimizer = build_optimizer(model, "adam", lr=1e-2, sharding="distributed")
    bias = next(param for name, param in model.named_parameters() if name == "1.bias")
    place, moved = bias.data_ptr(), bias.detach() + 1.0
    bias.data = moved
    model(torch.ones(2, 16)).sum().backward()
    optimizer.step()
    assert bias.data_ptr() == place
    torch.testing.assert_close(bias.detach(), moved, rtol=0, atol=0.011)


OVERLAPPED = DistributedDataParallelConfig(use_distributed_optimizer=True, overlap_param_gather=True)


@needs_adam
@pytest.mark.parametrize(
    ("configs", "asked", "reason"),
    [
        ([OVERLAPPED], False, "chunk 0 is wrapped with overlap_param_gather=True"),
        ([SHARDED], True, "chunk 0 is wrapped with overlap_param_gather=False"),
        ([OVERLAPPED, SHARDED], True, "chunk 1 is wrapped with overlap_param_gather=False"),
        ([SHARDED, OVERLAPPED], False, "chunk 1 is wrapped with overlap_param_gather=True"),
        ([DistributedDataParallelConfig()], True, "chunk 0 is not wrapped in .*; leave it out"),
        ([None], True, "chunk 0 is not wrapped in .*; leave it out"),
    ],
)
def test_the_wrapper_and_the_optimizer_overlap_alike(
    configs: list[DistributedDataParallelConfig | None], asked: bool, reason: str
) -> None:
    """Else nobody would wait for parameters, or nothing would be gained."""
    chunks = [
        model_of() if config is None else DistributedDataParallel(model_of(), config) for config in configs
    ]
    with pytest.raises(ConfigurationError, match=reason):
        build_optimizer(
            chunks,
            "adam",
            lr=1e-2,
            sharding="distributed",
            overlap_param_gather=asked,
            fqn=lambda chunk, name: f"{chunk}.{name}",
        )


def test_a_bucket_that_forward_does_not_wait_for_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bucket by bucket, whatever the one that was made last does."""
    awaited: list[Bucket] = []

    def finish(bucket: Bucket) -> None:
        awaited.append(bucket)

    monkeypatch.setattr(Bucket, "finish_param_sync", finish)
    one = communicator(None, torch.device("cpu"))
    reduction = Reduction(one, one, scatter=True, average=False, factor=1.0)
    key = BufferKey(torch.float32, torch.float32)
    buckets = [
        GatheredBucket(Bucket({}, reduction), key, start, frozenset({0}), start == 64)
        for start in (0, 64, 128)
    ]
    Gathering(buckets).finish_what_forward_does_not()
    assert awaited == [buckets[2].bucket, buckets[0].bucket]


@needs_adam
def test_a_replicated_optimizer_refuses_scattered_gradients() -> None:
    """No rank has whole gradients then."""
    with pytest.raises(ShardingError, match="use_distributed_optimizer=False"):
        build_optimizer(DistributedDataParallel(model_of(), SHARDED), "adam", lr=1e-2)


@needs_adam
def test_chunks_are_wrapped_alike() -> None:
    """Either all chunks have buffers, or none."""
    chunks = [DistributedDataParallel(model_of(), SHARDED), model_of()]
    with pytest.raises(ShardingError, match=r"model chunks \[1\]"):
        build_optimizer(
            chunks, "adam", lr=1e-2, sharding="distributed", fqn=lambda chunk, name: f"{chunk}.{name}"
        )


@needs_adam
def test_several_chunks_have_buffers_of_their_own() -> None:
    """Local names may be the same in every chunk."""
    chunks = [DistributedDataParallel(model_of(), SHARDED) for _ in range(2)]
    optimizer = build_optimizer(
        chunks, "adam", lr=1e-2, sharding="distributed", fqn=lambda chunk, name: f"{chunk}.{name}"
    )
    before = [param.detach().clone() for chunk in chunks for param in chunk.parameters()]
    for chunk in chunks:
        chunk(torch.ones(2, 16)).square().sum().backward()
    optimizer.step()
    after = [param for chunk in chunks for param in chunk.parameters()]
    assert not any(torch.equal(old, new) for old, new in zip(before, after, strict=True))


@needs_adam
def test_another_routing_than_the_layouts_is_refused() -> None:
    """A layout that was planned for a routing keeps it."""
    config = OptimizerConfig(optimizer="adam", lr=1e-2, sharding="distributed")
    module = model_of()
    layout = plan_full_param_layout(module, SHARDED, routing=route(config, module))
    wrapped = DistributedDataParallel(module, SHARDED, full_param_layout=layout)
    get_megatron_optimizer(config, wrapped)
    with pytest.raises(RoutingChangedError, match="change the routing of 4 parameters"):
        get_megatron_optimizer(OptimizerConfig(optimizer="sgd", lr=1e-2, sharding="distributed"), wrapped)


@needs_adam
def test_each_bucket_is_gathered_before_the_next_is_stepped(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last bucket comes first; what an optimizer counts in its groups is counted once a step."""
    wrapped = DistributedDataParallel(model_of(), SHARDED_IN_TWO)
    optimizer = build_optimizer(
        wrapped,
        "adam",
        lr=1e-2,
        overrides={},
        sharding="distributed",
        overlap_param_gather_with_optimizer_step=True,
    )
    [part] = optimizer.parts
    events: list[object] = []
    step, start = part.inner.step, type(part.sharded).start_unit_sync

    def watched_step() -> None:
        events.append([tensor.numel() for group in part.inner.param_groups for tensor in group["params"]])
        step()

    def watched_start(sharded: Any, unit: int) -> None:
        events.append(unit)
        start(sharded, unit)

    monkeypatch.setattr(part.inner, "step", watched_step)
    monkeypatch.setattr(type(part.sharded), "start_unit_sync", watched_start)
    wrapped(torch.ones(2, 16)).square().sum().backward()
    optimizer.step()
    assert events == [[16, 16 * 16], 0, [4, 4 * 16], 1]
    assert [len(group["params"]) for group in part.inner.param_groups] == [4]
    assert all(float(state["step"]) == 1 for state in part.inner.state.values())


class WholeTensors:
    """A plugin with an optimizer of whole tensors."""

    megaopt_api = "1"

    @hookimpl
    def megaopt_optimizer_entries(self) -> dict[str, OptimizerEntry]:
        """Return torch's SGD, as if it needed whole tensors."""
        return {"whole": OptimizerEntry(optimizer_cls=torch.optim.SGD, granularity=Granularity.TENSOR)}


class WithCompanion(WholeTensors):
    """One that brings a strategy that takes them, too."""

    @hookimpl
    def megaopt_sharding_strategies(self) -> dict[str, Replicated]:
        """Return a stand-in for the companion."""
        return {"layer_wise": Replicated("layer_wise")}


alone = pytest.mark.skipif(
    importlib.util.find_spec("megaopt_layerwise") is not None, reason="megaopt-layerwise is installed"
)


@alone
def test_an_optimizer_of_whole_tensors_is_never_cut() -> None:
    """While the strategy that takes it is not installed, the error says what to install."""
    settings = {"lr": 1e-2, "sharding": "distributed"}
    with (
        temporary_plugin(WholeTensors()),
        pytest.raises(PluginNotInstalledError, match="pip install megaopt-layerwise"),
    ):
        build_optimizer(model_of(), "whole", **settings)


@alone
def test_an_optimizer_of_whole_tensors_goes_to_the_companion_with_a_warning() -> None:
    """Every parameter is stepped whole, and the user is told."""
    config = OptimizerConfig(optimizer="whole", lr=1e-2, sharding="distributed")
    message = "'whole' steps whole tensors: it is sharded with 'layer_wise', not with 'distributed'"
    with temporary_plugin(WithCompanion()), pytest.warns(UserWarning, match=message):
        routing = route(config, model_of())
    assert {entry.strategy for entry in routing.params.values()} == {"layer_wise"}
