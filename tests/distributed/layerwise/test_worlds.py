"""Owners in every kind of world: few matrices, many ranks, experts, accumulation, clipping."""

import itertools
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from long_runs import sometimes
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

sys.path.insert(0, str(Path(__file__).parent))

pytest.importorskip("megaopt_layerwise")
pytest.importorskip("megaopt_muon")
from layerwise_runs import PLAIN, differing, given_gradients, several, train

from megaopt_core import MatrixView, build_optimizer

pytestmark = [pytest.mark.any_python, pytest.mark.distributed]

BUFFERS = {"overlap_grad_reduce": True, "bucket_size": 1500}


@pytest.mark.parametrize(
    ("optimizer", "dtype"),
    sometimes(
        itertools.product(["muon", "adaptive_muon", "soap"], [torch.float32, torch.bfloat16]),
        always=[("muon", torch.float32), ("soap", torch.bfloat16)],
    ),
)
def test_two_ranks_with_tied_frozen_and_accumulated(launch, optimizer, dtype):
    """Under torch's DDP and in buffers; several batches a step; one matrix alone, so that a rank owns nothing."""
    pytest.importorskip("megaopt_soap" if optimizer == "soap" else "megaopt_muon")
    kinds = {
        "tied": {"model": {"tied": True, "dtype": dtype}},
        "frozen": {"model": {"frozen": True, "dtype": dtype}},
        "accumulated": {"micro": 3, "model": {"dtype": dtype}},
        "one matrix": {"model": {"count": 0, "dtype": dtype}},
    }
    runs, settings = {}, {"settings": {"bf16": dtype is torch.bfloat16}}
    for kind, given in kinds.items():
        options = {**given, **settings}
        runs[kind, "expected"] = (optimizer, "replicated", "torch"), options
        runs[kind, "torch"] = (optimizer, "layer_wise", "torch"), options
        runs[kind, "buffers"] = (optimizer, "layer_wise", "buffers"), {**options, "ddp": BUFFERS}
    results = launch(several, 2, runs)
    wrong = {
        (*run, rank): differing(result[run[0], "expected"][0], result[run][0])
        for rank, result in enumerate(results)
        for run in runs
    }
    assert {run: names for run, names in wrong.items() if names} == {}


def test_clipping_comes_within_rounding(launch):
    """Norms add up in another order where matrices have owners."""
    settings = {"clip_grad": 0.1, "log_num_zeros_in_grad": True}
    runs = {
        sharding: (("muon", sharding, "torch"), {"settings": settings})
        for sharding in ("replicated", "layer_wise")
    }
    for result in launch(several, 2, runs):
        (expected, said), (found, told) = result["replicated"], result["layer_wise"]
        assert told[1] == pytest.approx(said[1], rel=1e-6)
        assert told[2] == said[2]
        for name, value in expected.items():
            assert (found[name] - value).norm() <= 2e-6 * value.norm(), name


def many(rank: int, size: int, runs: Mapping[str, tuple[Any, Any]]) -> dict[str, dict[str, torch.Tensor]]:
    """Step on given gradients, run after run."""
    return {
        name: given_gradients(rank, size, *arguments, **options)
        for name, (arguments, options) in runs.items()
    }


@pytest.mark.parametrize("size", sometimes([3, 4], [3]))
def test_at_more_ranks_given_gradients_make_the_same_bits(launch, size):
    """More ranks than matrices too; some gradients are missing in the first step."""
    missing = ("last.weight", "blocks.1.1.weight", "blocks.1.0.bias")
    runs = {
        "fp32": (("muon", "layer_wise"), {}),
        "bf16": (("muon", "layer_wise"), {"model": {"dtype": torch.bfloat16}, "settings": {"bf16": True}}),
        "adaptive": (("adaptive_muon", "layer_wise"), {}),
        "one matrix": (("muon", "layer_wise"), {"model": {"count": 0}}),
        "missing": (("muon", "layer_wise"), {"missing": missing}),
    }
    alone = many(
        0, 1, {name: ((optimizer, "replicated"), options) for name, ((optimizer, _), options) in runs.items()}
    )
    for result in launch(many, size, runs):
        assert {name: differing(alone[name], result[name]) for name in runs} == {name: [] for name in runs}


def mixture(
    rank: int,
    size: int,
    sharding: str,
    place: int,
    experts_of: int,
    optimizer: str = "muon",
    dtype: torch.dtype = torch.float32,
) -> tuple[dict[str, torch.Tensor], int]:
    """Step a model with experts on given gradients; return what this rank has of it."""
    generator = torch.Generator().manual_seed(0)
    model = nn.Module()
    shapes = {"dense": (24, 16), "narrow": (16, 8), "router": (8, 16)}
    for name, shape in shapes.items():
        model.register_parameter(name, nn.Parameter(torch.randn(shape, generator=generator).to(dtype)))
    whole = torch.randn(4, 12, 16, generator=generator).to(dtype)
    model.register_parameter("experts", nn.Parameter(whole.chunk(experts_of)[place].clone()))
    model.experts.allreduce = False
    for name in shapes:
        model.get_parameter(name).matrix_view = MatrixView()
    model.experts.matrix_view = MatrixView(batch_dims=1, label="experts")
    names = {"experts": f"experts{place}"}
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep")) if size > 1 else None
    stepper = build_optimizer(
        model,
        optimizer,
        sharding=sharding,
        pg_collection=mesh,
        bf16=dtype is torch.bfloat16,
        fqn=lambda _, name: names.get(name, name),
        **PLAIN,
    )
    for _ in range(3):
        for name, param in model.named_parameters():
            shape = whole.shape if name == "experts" else param.shape
            grad = torch.randn(shape, generator=generator).to(dtype)
            param.grad = grad.chunk(experts_of)[place].clone() if name == "experts" else grad
        stepper.step()
    states = sum(
        value.numel()
        for part in stepper.parts
        for state in part.inner.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor)
    )
    return {name: param.detach().clone() for name, param in model.named_parameters()}, states


def on_mesh(rank: int, size: int, optimizer: str, dtype: torch.dtype) -> tuple[dict[str, torch.Tensor], int]:
    """Step with experts on two expert-parallel ranks, each with two copies."""
    return mixture(rank, size, "layer_wise", rank % 2, 2, optimizer, dtype)


@pytest.mark.parametrize(
    ("optimizer", "dtype"),
    [("muon", torch.float32), ("adaptive_muon", torch.bfloat16), ("soap", torch.float32)],
)
def test_experts_have_owners_in_their_own_group(launch, optimizer, dtype):
    """Dense matrices are shared out over four ranks, the experts of each place over two, whoever steps them."""
    pytest.importorskip("megaopt_soap" if optimizer == "soap" else "megaopt_muon")
    alone, all_states = mixture(0, 1, "replicated", 0, 1, optimizer, dtype)
    results = launch(on_mesh, 4, optimizer, dtype)
    for rank, (values, _) in enumerate(results):
        expected = {**alone, "experts": alone["experts"].chunk(2)[rank % 2]}
        assert differing(expected, values) == []
    states = [states for _, states in results]
    if optimizer == "muon":  # others keep a step count beside, once on each rank that has some of a batch
        assert sum(states) == all_states
        assert max(states) * len(states) <= 1.1 * all_states


def cut_twice(
    rank: int, size: int, sharding: str, optimizer: str = "muon", settings: Mapping[str, Any] | None = None
) -> tuple[dict[str, torch.Tensor], int, tuple[int, int], dict[str, str]]:
    """Step a dense matrix that two ranks cut, and experts that expert and tensor parallelism cut at once."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ep", "tp")) if size > 1 else None
    ep, tp = (mesh["ep"].get_local_rank(), mesh["tp"].get_local_rank()) if mesh is not None else (0, 0)
    generator = torch.Generator().manual_seed(0)

    def part(name, whole):
        if size == 1:
            return whole.clone()
        if name != "experts":
            return whole.chunk(2, 0)[tp].clone()
        return whole.chunk(2, 0)[ep].chunk(2, 1)[tp].clone()

    shapes, model = {"dense": (24, 16), "other": (16, 8), "experts": (4, 12, 16)}, nn.Module()
    for name, shape in shapes.items():
        param = nn.Parameter(part(name, torch.randn(shape, generator=generator)))
        param.matrix_view = MatrixView(batch_dims=len(shape) - 2)
        if size > 1:
            param.tensor_model_parallel, param.partition_dim = True, len(shape) - 2
        param.allreduce = name != "experts"
        model.register_parameter(name, param)
    stepper = build_optimizer(
        model,
        optimizer,
        sharding=sharding,
        pg_collection=mesh,
        fqn=lambda _, name: f"experts{ep}" if name == "experts" else name,
        **{**PLAIN, **(settings or {})},
    )
    calls, exchange = [], dist.all_to_all_single
    dist.all_to_all_single = lambda *args, **kwargs: (calls.append(args), exchange(*args, **kwargs))[1]
    for _ in range(3):
        for name, param in model.named_parameters():
            param.grad = part(name, torch.randn(shapes[name], generator=generator))
        stepper.step()
    wholes = {name: param.detach().clone() for name, param in model.named_parameters()}
    return wholes, len(calls), (ep, tp), {row.name: row.owner for row in stepper.report().params}


@pytest.mark.parametrize(
    "settings", [{}, {"overlap_param_gather_with_optimizer_step": True}], ids=["", "early"]
)
def test_expert_and_tensor_parallelism_cut_experts_at_once(launch, settings):
    """Each place along ep has its experts whole on an owner among its tensor-parallel ranks: bits of one process."""
    alone, _, _, _ = cut_twice(0, 1, "replicated")
    for values, calls, (ep, tp), owners in launch(cut_twice, 4, "layer_wise", "muon", settings):
        expected = {name: alone[name].chunk(2, 0)[tp] for name in ("dense", "other")}
        expected["experts"] = alone["experts"].chunk(2, 0)[ep].chunk(2, 1)[tp]
        assert differing(expected, values) == []
        assert calls <= 3 * 4
        assert "expert_tp" in owners[f"experts{ep}"]


def unequal(rank: int, size: int) -> float:
    """Return how far parameters are from a replicated run at four ranks, through gloo's own reductions."""
    settings = {"muon_fp32_matmul_prec": "highest"}
    expected, _ = train(rank, size, "muon", "replicated", "torch", settings=settings)
    found, _ = train(rank, size, "muon", "layer_wise", "buffers", ddp=BUFFERS, settings=settings)
    params = [name for name in expected if "/" not in name]
    return max(float((found[name] - expected[name]).norm() / expected[name].norm()) for name in params)


def test_four_ranks_reduce_in_buckets_to_owners(launch):
    """Gloo adds four ranks up in an order that depends on the position in the bucket."""
    assert max(launch(unequal, 4)) <= 1e-5


def told_twice(rank: int, size: int) -> tuple[dict[str, str], list[list[str]], bool]:
    """Build twice, and return what the report says of owners, and which matrices live here."""
    from layerwise_runs import blocks, owned

    stepper = build_optimizer(blocks(), "muon", sharding="layer_wise", **PLAIN)
    rows = {row.name: row.owner for row in stepper.report().params if row.owner}
    gathered = [None] * size
    dist.all_gather_object(gathered, owned(stepper))
    return rows, gathered, "owner" in str(stepper.report(full=True))


def test_the_report_names_owners(launch):
    """Every matrix has one, the same on every rank."""
    results = launch(told_twice, 2)
    for rows, owned, shown in results:
        assert rows == {name: f"dp {rank}" for rank, names in enumerate(owned) for name in names}
        assert shown
