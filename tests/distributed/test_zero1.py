"""The distributed optimizer takes the same steps as a replicated one."""

import importlib.util
from collections.abc import Iterable, Mapping
from typing import Any

import pytest
import torch
from long_runs import sometimes
from megaopt_distributed import DistributedDataParallel, DistributedDataParallelConfig
from models import awkward, batch, loss_of, states_of, values_of
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from megaopt_core import ParamKey, ParamPredicate, ProcessGroupCollection, build_optimizer
from megaopt_core.errors import ShardingError

pytestmark = [pytest.mark.any_python, pytest.mark.distributed]

STEPS = 10
OVERLAP = {"overlap_grad_reduce": True, "bucket_size": 400}
OVERLAPS = {**OVERLAP, "overlap_param_gather": True}
PLAIN = {"clip_grad": 0.0, "weight_decay": 0.1}
REPLICATED_PARAMS = {"use_distributed_optimizer": False}
needs_lion = pytest.mark.skipif(importlib.util.find_spec("megaopt_lion") is None, reason="steps with lion")


def under_torch_ddp(
    rank: int,
    size: int,
    optimizer: str,
    sharding: str,
    settings: Mapping[str, Any] = PLAIN,
    dtype: torch.dtype = torch.float32,
    steps: int = STEPS,
) -> dict[str, torch.Tensor]:
    """Train under torch's DDP and return every parameter and state."""
    model = awkward(dtype=dtype)
    wrapped = TorchDDP(model)
    stepper = build_optimizer(wrapped, optimizer, lr=1e-2, sharding=sharding, **settings)
    for step in range(steps):
        loss_of(wrapped, batch(step, rank)).backward()
        stepper.step()
        stepper.zero_grad()
    return values_of(model) | states_of(stepper)


def in_buffers(
    rank: int,
    size: int,
    optimizer: str,
    sharding: str,
    ddp: Mapping[str, Any] | None = None,
    settings: Mapping[str, Any] = PLAIN,
    dtype: torch.dtype = torch.float32,
    steps: int = STEPS,
) -> dict[str, torch.Tensor]:
    """Train under our own wrapper and return every parameter and state."""
    config = {"use_distributed_optimizer": sharding == "distributed", **(ddp or {})}
    model = DistributedDataParallel(awkward(dtype=dtype), DistributedDataParallelConfig(**config))
    stepper = build_optimizer(model, optimizer, lr=1e-2, sharding=sharding, **settings)
    for step in range(steps):
        loss_of(model, batch(step, rank)).backward()
        stepper.step()
        stepper.zero_grad()
    model.finish_param_sync()
    return values_of(model.module) | states_of(stepper)


def several(rank: int, size: int, runs: Mapping[str, tuple[Any, ...]]) -> dict[str, Any]:
    """Do several runs one after the other in the same processes."""
    return {
        name: globals()[function](rank, size, *arguments) for name, (function, *arguments) in runs.items()
    }


def given_gradients(
    rank: int,
    size: int,
    sharding: str,
    build: str = "awkward",
    settings: Mapping[str, Any] = PLAIN,
    pgs: ProcessGroupCollection | None = None,
) -> dict[str, torch.Tensor]:
    """Step on gradients that are the same on all ranks; the last parameter gets none in every third step."""
    model = {"awkward": awkward, "tiny": tiny}[build]()
    stepper = build_optimizer(model, "adam", lr=1e-2, sharding=sharding, **settings)
    generator = torch.Generator().manual_seed(3)
    params = [param for param in model.parameters() if param.requires_grad]
    for step in range(STEPS):
        for param in params:
            param.grad = torch.randn(param.shape, generator=generator)
        if step % 3 == 2:
            params[-1].grad = None
        stepper.step()
    return values_of(model)


def tiny(width: int = 1) -> nn.Linear:
    """A layer; with one row and column it has fewer parameters than ranks."""
    torch.manual_seed(1)
    return nn.Linear(width, width)


def differing(
    expected: Mapping[str, torch.Tensor], ranks: Iterable[Mapping[str, torch.Tensor]]
) -> list[tuple[int, str]]:
    """Return what differs from the expected values, on any rank."""
    return [
        (rank, name)
        for rank, values in enumerate(ranks)
        for name, value in expected.items()
        if name not in values or not torch.equal(value, values[name])
    ]


@pytest.mark.parametrize(
    "optimizer",
    [*sometimes(["adam", "sgd"], ["adam"]), pytest.param("lion", marks=[needs_lion, pytest.mark.long])],
)
def test_bits_are_those_of_a_replicated_optimizer(launch, optimizer):
    """Two ranks, ten steps, nothing clipped: under torch's DDP and in buffers, with and without overlaps."""
    gather = {**PLAIN, "overlap_param_gather": True}
    early = {**PLAIN, "overlap_param_gather_with_optimizer_step": True}
    runs = {
        "expected": ("under_torch_ddp", optimizer, "replicated"),
        "own memory": ("under_torch_ddp", optimizer, "distributed"),
        "own memory, our wrapper": ("in_buffers", optimizer, "distributed", REPLICATED_PARAMS),
        "replicated, our wrapper": ("in_buffers", optimizer, "replicated"),
        "replicated, overlap": ("in_buffers", optimizer, "replicated", OVERLAP),
        "distributed": ("in_buffers", optimizer, "distributed"),
        "distributed, a bucket a parameter": (
            "in_buffers",
            optimizer,
            "distributed",
            {"overlap_grad_reduce": True, "bucket_size": 1},
        ),
        "distributed, overlap": ("in_buffers", optimizer, "distributed", OVERLAP),
        "distributed, overlaps": ("in_buffers", optimizer, "distributed", OVERLAPS, gather),
        "distributed, aligned": (
            "in_buffers",
            optimizer,
            "distributed",
            {**OVERLAPS, "align_param_gather": True},
            gather,
        ),
        "distributed, gathered in the step": ("in_buffers", optimizer, "distributed", OVERLAP, early),
        "distributed, all overlaps": ("in_buffers", optimizer, "distributed", OVERLAPS, {**gather, **early}),
        "own memory, gathered in the step": ("under_torch_ddp", optimizer, "distributed", early),
        "averaging": ("in_buffers", optimizer, "distributed", {"average_in_collective": True}),
    }
    results = launch(several, 2, runs)
    expected = results[0]["expected"]
    states = {"adam": "gain/exp_avg_sq", "sgd": "gain/momentum_buffer", "lion": "gain/exp_avg"}
    assert states[optimizer] in expected
    assert [run for run in runs if differing(expected, [result[run] for result in results])] == []


@pytest.mark.parametrize("size", sometimes([3, 4], [3]))
def test_at_more_ranks_given_gradients_make_the_same_bits(launch, size):
    """Three and four ranks; more ranks than parameters; a parameter without a gradient is skipped."""
    for build in ("awkward", "tiny"):
        expected = given_gradients(0, 1, "replicated", build)
        assert differing(expected, launch(given_gradients, size, "distributed", build)) == []


def test_four_ranks_come_within_rounding_of_a_replicated_optimizer(launch):
    """Gloo adds four ranks up in an order that depends on the position in the bucket."""
    runs = {
        "expected": ("under_torch_ddp", "adam", "replicated"),
        "sharded": ("in_buffers", "adam", "distributed", OVERLAP),
    }
    results = launch(several, 4, runs)
    for result in results:
        for name, value in results[0]["expected"].items():
            assert (result["sharded"][name] - value).norm() <= 1e-6 * value.norm(), name
        assert differing(results[0]["sharded"], [result["sharded"]]) == []


def test_clipping_is_the_same_up_to_rounding(launch):
    """Sharded norms add up in another order; of more steps some processors' rounding grows beyond a millionth."""
    settings = {"clip_grad": 0.01, "log_num_zeros_in_grad": True}
    few = settings, torch.float32, 3
    runs = {
        "expected": ("under_torch_ddp", "adam", "replicated", *few),
        "own memory": ("under_torch_ddp", "adam", "distributed", *few),
        "buffers": ("in_buffers", "adam", "distributed", OVERLAP, *few),
    }
    for result in launch(several, 2, runs):
        for name, value in result["expected"].items():
            assert (result["own memory"][name] - value).norm() <= 1e-6 * value.norm(), name
            assert (result["buffers"][name] - value).norm() <= 1e-6 * value.norm(), name


MIXED = {
    "main params": {"bf16": True, **PLAIN},
    "remainders": {"bf16": True, "use_precision_aware_optimizer": True, **PLAIN},
    "low moments": {
        "bf16": True,
        "use_precision_aware_optimizer": True,
        "exp_avg_dtype": torch.bfloat16,
        "exp_avg_sq_dtype": torch.bfloat16,
        **PLAIN,
    },
}


@pytest.mark.parametrize("settings", list(MIXED.values()), ids=list(MIXED))
def test_mixed_precision_has_the_bits_of_a_replicated_optimizer(launch, settings):
    """bf16 parameters, fp32 reduction: main parameters, remainders and narrow moments are sharded alike."""
    fp32 = {"grad_reduce_in_fp32": True}
    runs = {
        "expected": ("in_buffers", "adam", "replicated", fp32, settings, torch.bfloat16),
        "sharded": ("in_buffers", "adam", "distributed", {**fp32, **OVERLAP}, settings, torch.bfloat16),
        "overlaps": (
            "in_buffers",
            "adam",
            "distributed",
            {**fp32, **OVERLAPS},
            {**settings, "overlap_param_gather": True, "overlap_param_gather_with_optimizer_step": True},
            torch.bfloat16,
        ),
    }
    results = launch(several, 2, runs)
    assert differing(results[0]["expected"], [result["sharded"] for result in results]) == []
    assert differing(results[0]["expected"], [result["overlaps"] for result in results]) == []


@pytest.mark.parametrize("settings", list(MIXED.values()), ids=list(MIXED))
def test_mixed_precision_on_plain_gradients_has_the_bits_of_a_replicated_optimizer(launch, settings):
    """bf16 parameters under torch's DDP, whose gradients are bf16 too and in `grad`."""
    runs = {
        sharding: ("under_torch_ddp", "adam", sharding, settings, torch.bfloat16)
        for sharding in ("replicated", "distributed")
    }
    results = launch(several, 2, runs)
    expected = results[0]["replicated"]
    assert {name for name in expected if name.startswith("gain/")} >= {"gain/exp_avg", "gain/exp_avg_sq"}
    assert differing(expected, [result["distributed"] for result in results]) == []


def with_inf_in_one_shard(rank: int, size: int) -> tuple[int, list[tuple[bool, bool, float]]]:
    """Step twice on fp16 gradients, the first time with an inf in the last element of a parameter."""
    model = tiny(8).half()
    settings = {"fp16": True, "initial_loss_scale": 4.0, "hysteresis": 1, **PLAIN}
    stepper = build_optimizer(model, "adam", lr=1e-2, sharding="distributed", **settings)
    owned = sum(shard.numel for part in stepper.parts for p in part.pieces for _, shard in p.spec.members)
    seen = []
    for value in (float("inf"), 1.0):
        before = values_of(model)
        for param in model.parameters():
            param.grad = torch.ones_like(param)
        model.weight.grad[-1, -1] = value
        updated = stepper.step().update_successful
        seen.append((updated, any(differing(before, [values_of(model)])), stepper.get_loss_scale().item()))
    return owned, seen


def test_an_inf_in_one_ranks_shard_skips_the_step_on_all(launch):
    """Nothing moves and the loss scale falls, on the rank that has no inf too; the next step is taken."""
    results = launch(with_inf_in_one_shard, 2)
    assert all(0 < owned < 8 * 8 + 8 for owned, _ in results)
    assert [seen for _, seen in results] == [[(False, False, 2.0), (True, True, 2.0)]] * 2


def with_two_optimizers(rank: int, size: int, sharding: str) -> dict[str, torch.Tensor]:
    """Matrices by adam, the rest by sgd, in the same buffers."""
    config = DistributedDataParallelConfig(use_distributed_optimizer=sharding == "distributed", **OVERLAP)
    model = DistributedDataParallel(awkward(), config)
    overrides = {ParamKey(predicate=ParamPredicate(name="vector", fn=is_vector)): {"optimizer": "sgd"}}
    stepper = build_optimizer(model, "adam", overrides=overrides, lr=1e-2, sharding=sharding, **PLAIN)
    for step in range(STEPS):
        loss_of(model, batch(step, rank)).backward()
        stepper.step()
        stepper.zero_grad()
    return values_of(model.module)


def is_vector(param: torch.Tensor) -> bool:
    """Whether a parameter is no matrix."""
    return param.ndim < 2


def test_two_optimizers_share_a_buffer(launch):
    """A bucket is gathered once, after both have stepped their parts of it."""
    expected = launch(with_two_optimizers, 2, "replicated")[0]
    assert differing(expected, launch(with_two_optimizers, 2, "distributed")) == []


def with_instances(rank: int, size: int, instances: int) -> tuple[dict[str, torch.Tensor], int, float | None]:
    """Train with the optimizer sharded inside instances; return parameters and elements of state."""
    config = DistributedDataParallelConfig(
        use_distributed_optimizer=True, num_distributed_optimizer_instances=instances, **OVERLAP
    )
    model = DistributedDataParallel(awkward(), config)
    stepper = build_optimizer(model, "adam", lr=1e-2, sharding="distributed", clip_grad=0.01)
    for step in range(STEPS):
        loss_of(model, batch(step, rank)).backward()
        result = stepper.step()
        stepper.zero_grad()
    held = sum(tensor.numel() for tensor in stepper.get_main_params())
    return values_of(model.module), held, result.grad_norm


def test_instances_shard_inside_and_replicate_across(launch):
    """Two instances of two ranks each train like one of four, and each holds all of the state once."""
    one, two = launch(with_instances, 4, 1), launch(with_instances, 4, 2)
    total = sum(param.numel() for param in awkward().parameters() if param.requires_grad)
    assert sum(held for _, held, _ in one) == total
    assert sum(held for _, held, _ in two[:2]) == sum(held for _, held, _ in two[2:]) == total
    assert two[0][2] == pytest.approx(one[0][2], rel=1e-5)
    for values, *_ in two:
        for name, value in one[0][0].items():
            torch.testing.assert_close(values[name], value, rtol=1e-5, atol=1e-6)
        assert differing(two[0][0], [values]) == []


class WithExpert(nn.Module):
    """Two dense layers and, between them, the expert of this rank."""

    def __init__(self, expert: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(16, 16), nn.Linear(16, 4)
        torch.manual_seed(1 + expert)
        self.expert = nn.Linear(16, 16)
        for param in self.expert.parameters():
            param.allreduce = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the last layer's values."""
        return self.last(torch.tanh(self.expert(torch.tanh(self.first(x)))))


def with_experts(rank: int, size: int, sharding: str) -> tuple[dict[str, torch.Tensor], int]:
    """Train dense parameters over four ranks and each of two experts over two; return names that tell experts apart."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    expert = rank % 2
    config = DistributedDataParallelConfig(use_distributed_optimizer=sharding == "distributed", **OVERLAP)
    model = DistributedDataParallel(WithExpert(expert), config, mesh)

    def fqn(chunk, name):
        return name.replace("expert", f"expert{expert}")

    stepper = build_optimizer(model, "adam", lr=1e-2, sharding=sharding, pg_collection=mesh, fqn=fqn, **PLAIN)
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(100 * step + rank)
        model(torch.randn(8, 16, generator=generator)).square().mean().backward()
        stepper.step()
        stepper.zero_grad()
    held = sum(tensor.numel() for tensor in stepper.get_main_params())
    return {fqn(0, name): value for name, value in values_of(model.module).items()}, held


def test_experts_are_shared_out_over_their_own_ranks(launch):
    """Two experts on two ranks each, which train as if every rank stepped everything."""
    expected, sharded = launch(with_experts, 4, "replicated"), launch(with_experts, 4, "distributed")
    dense, expert = 16 * 16 + 16 + 16 * 4 + 4, 16 * 16 + 16
    assert sum(held for _, held in sharded) == dense + 2 * expert
    for (values, _), (others, _) in zip(expected, sharded, strict=True):
        for name, value in values.items():
            assert (others[name] - value).norm() <= 1e-6 * value.norm(), name
    assert differing(sharded[0][0], [sharded[2][0]]) == differing(sharded[1][0], [sharded[3][0]]) == []
    assert not torch.equal(sharded[0][0]["expert0.weight"], sharded[1][0]["expert1.weight"])


ROWS = {
    "fp32": (8, torch.float32, {}),
    "bf16": (12, torch.bfloat16, {"bf16": True}),
    "remainders": (10, torch.bfloat16, {"bf16": True, "use_precision_aware_optimizer": True}),
    "bf16 moments": (
        6,
        torch.bfloat16,
        {
            "bf16": True,
            "use_precision_aware_optimizer": True,
            "exp_avg_dtype": torch.bfloat16,
            "exp_avg_sq_dtype": torch.bfloat16,
        },
    ),
}
"""Bytes a parameter, dtype of the model, settings: the table of docs/distributed.md."""


def state_bytes(rank: int, size: int, dtype: torch.dtype, settings: Mapping[str, Any]) -> int:
    """Return the bytes of the memory that the optimizer alone holds on this rank after a step."""
    model = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256)).to(dtype)
    wrapped = DistributedDataParallel(model, DistributedDataParallelConfig(use_distributed_optimizer=True))
    stepper = build_optimizer(wrapped, "adam", lr=1e-2, sharding="distributed", **settings)
    wrapped(torch.ones(2, 256, dtype=dtype)).sum().backward()
    stepper.step()
    held = {}
    for part in stepper.parts:
        states = [value for state in part.inner.state.values() for value in state.values()]
        watched = [tensor for tensors in part.precision.watched() for tensor in tensors]
        for tensor in [*states, *part.stepped, *watched]:
            is_number_or_empty = tensor.ndim == 0 or 0 in tensor.stride()
            if not is_number_or_empty:
                held[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
    for buffer in wrapped.param_and_grad_buffers.values():
        held.pop(buffer.param_data.untyped_storage().data_ptr(), None)
    return sum(held.values())


@pytest.mark.parametrize("size", sometimes([2, 4], [2]))
@pytest.mark.parametrize("row", ROWS)
def test_state_takes_the_bytes_that_the_documentation_says(launch, size, row):
    """Bytes a parameter, divided by the number of ranks; nothing here needs padding."""
    per_param, dtype, settings = ROWS[row]
    params = 2 * (256 * 256 + 256)
    assert launch(state_bytes, size, dtype, settings) == [per_param * params // size] * size


def channels_last(rank: int, size: int, first: str, options: Mapping[str, Any]) -> list[Any]:
    """Train convolutions whose weights are in channels-last order, under torch's DDP; tell why not, or the weights."""
    found = []
    for sharding in ("replicated", "distributed"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(4, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3))
        model = model.to(memory_format=torch.channels_last)
        wrapped = TorchDDP(model, **options) if first == "wrapped" else model
        try:
            stepper = build_optimizer(wrapped, "adam", lr=1e-2, sharding=sharding, **PLAIN)
        except ShardingError as error:
            assert not model[0].weight.is_contiguous()  # nothing has moved
            found.append(str(error))
            continue
        wrapped = TorchDDP(model, **options) if first == "built" else wrapped
        for step in range(3):
            generator = torch.Generator().manual_seed(10 * step + rank)
            wrapped(torch.randn(2, 4, 8, 8, generator=generator)).square().mean().backward()
            stepper.step()
            stepper.zero_grad()
        found.append(model[0].weight.detach().contiguous().clone())
    return found


@pytest.mark.parametrize(
    ("first", "options", "is_right"),
    [
        ("wrapped", {}, False),
        ("wrapped", {"find_unused_parameters": True}, False),
        ("wrapped", {"gradient_as_bucket_view": True}, True),
        ("built", {"find_unused_parameters": True}, True),
    ],
)
def test_the_order_of_buckets_is_the_order_of_parameters(launch, first, options, is_right):
    """Where torch has laid out its buckets before parameters move, gradients would be permuted: that is refused."""
    for replicated, sharded in launch(channels_last, 2, first, options):
        if is_right:
            torch.testing.assert_close(sharded, replicated, rtol=1e-5, atol=1e-6)
        else:
            assert "'0.weight' has the strides (36, 1, 12, 4)" in sharded
            assert "gradient_as_bucket_view=True" in sharded


def loaded_again(rank: int, size: int, dtype: str) -> dict[str, float]:
    """Return how far states are from what they were, in parts of the largest, once a state dict is loaded."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 65), nn.Linear(65, 3))
    settings = {"exp_avg_dtype": dtype, "exp_avg_sq_dtype": dtype, "use_precision_aware_optimizer": True}
    stepper = build_optimizer(model, "adam", lr=1e-2, sharding="distributed", **settings)
    for param in model.parameters():
        param.grad = torch.randn_like(param) * 1e-3
    stepper.step()
    saved = stepper.state_dict()
    moments = [
        (param, name, key)
        for param, name in stepper.names.items()
        for key in ("exp_avg", "exp_avg_sq")
        if key in stepper.state[param] and stepper.state[param][key].numel()
    ]
    before = {(name, key): stepper.state[param][key].clone() for param, name, key in moments}
    for param, _, key in moments:
        stepper.state[param][key] = torch.ones_like(stepper.state[param][key])
    stepper.load_state_dict(saved)
    return {
        f"{name} {key}": float(
            (stepper.state[param][key] - before[name, key]).abs().max() / before[name, key].abs().max()
        )
        for param, name, key in moments
    }


@pytest.mark.parametrize(("dtype", "most"), [("float16", 0.0), ("uint8", 0.05)])
def test_a_state_dict_has_the_values_of_states_in_codes(launch, dtype, most):
    """What a rank has of a cut parameter is stored with scales, and a state dict has no place for these."""
    found = launch(loaded_again, 2, dtype)
    assert all(found)
    assert [name for of_rank in found for name, far in of_rank.items() if far > most] == []
