"""What the report says of each matrix."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megaopt_muon.muon import TensorParallelMuon
from megaopt_muon.notes import param_notes
from torch import nn

from megaopt_core import build_optimizer
from megaopt_core.optimizers import MegatronOptimizer
from megaopt_core.params import MatrixView, ParamInfo, Role

pytestmark = pytest.mark.any_python


def step(model: nn.Module, optimizer: MegatronOptimizer) -> None:
    """Step with some gradient."""
    for param in model.parameters():
        param.grad = torch.randn_like(param)
    optimizer.step()


def test_the_report_tells_the_method_of_each_matrix(in_bfloat16):
    """Before the first step nothing is chosen; after it every matrix has a method, and vectors have none."""
    model = nn.Sequential(
        nn.Linear(256, 300), nn.ReLU(), nn.Linear(300, 256), nn.LayerNorm(256), nn.Linear(256, 2)
    )
    optimizer = build_optimizer(model, "muon", lr=0.1, muon_ns_method="gram")
    assert "how" not in str(optimizer.report(full=True)).splitlines()[0]
    step(model, optimizer)
    report = optimizer.report(full=True)
    notes = {row.name: row.note for row in report.params if row.note}
    assert notes == {"0.weight": "gram", "2.weight": "gram"}
    assert "how" in str(report).splitlines()[0]


def test_matrices_of_one_weight_may_differ(in_bfloat16):
    """Pieces of several shapes are told apart."""
    param = nn.Parameter(torch.randn(768, 300))
    param.param_info = ParamInfo("w", Role.MATRIX, MatrixView(split_sizes=(512, 256)))
    optimizer = TensorParallelMuon([param], ns_plan="256x300:gram 300x512:plain")
    param.grad = torch.randn_like(param)
    optimizer.step()
    assert param_notes(optimizer) == {"w": "512x300 plain, 256x300 gram"}


def test_tensor_parallel_ranks_are_told():
    """With how many others the matrix is orthogonalized, and in which way."""
    groups = SimpleNamespace(tp=SimpleNamespace(size=lambda: 4, rank=lambda: 0))
    params = [nn.Parameter(torch.empty(4096, 64)), nn.Parameter(torch.empty(128, 8))]
    for name, param in zip("ab", params, strict=True):
        param.param_info = ParamInfo(name, Role.MATRIX, MatrixView(), partition_dim=0)
    optimizer = TensorParallelMuon(params, pg_collection=groups, tp_mode="auto", ns_plan="8x512:gram")
    for param in params:
        optimizer.planner.plan(param)
    assert param_notes(optimizer) == {
        "a": "plain; distributed over 4 ranks",
        "b": "gram; duplicated over 4 ranks",
    }


def fused(label: str) -> nn.Parameter:
    """Return a weight of three matrices."""
    param = nn.Parameter(torch.randn(24, 8))
    view = MatrixView(split_sizes=(8, 8, 8), label=label, fused=label, head_sizes=(4, 4, 4))  # type: ignore[arg-type]
    param.param_info = ParamInfo("w", Role.MATRIX, view)  # type: ignore[attr-defined]
    return param


@pytest.mark.parametrize(
    ("label", "settings", "said"),
    [
        ("qkv", {}, ["plain"]),
        ("qkv", {"split_qkv": False}, ["not split", "plain"]),
        ("qkv", {"split": "none"}, ["not split", "plain"]),
        ("qkv", {"split": "per_head"}, ["plain", "6 heads"]),
        ("qkv", {"split": "per_head", "split_qkv": False}, ["not split", "plain"]),
        ("gate_up", {"split_qkv": False}, ["plain"]),
        ("gate_up", {"split": "none"}, ["not split", "plain"]),
    ],
)
def test_a_fused_weight_that_is_left_whole_is_told(
    label: str, settings: dict[str, Any], said: list[str]
) -> None:
    """The report shows what a weight consists of: the note, also before a step, that it is not taken apart."""
    param = fused(label)
    optimizer = TensorParallelMuon([param], ns_method="standard", **{"split_qkv": True, **settings})
    before = {"w": "not split"} if "not split" in said else {}
    assert param_notes(optimizer) == before
    param.grad = torch.randn_like(param)
    optimizer.step()
    assert param_notes(optimizer) == {"w": "; ".join(said)}


def test_a_weight_that_is_left_whole_is_told_by_the_report() -> None:
    """With the view that its reader gave it, whatever steps are made of it."""
    model = nn.Sequential(nn.Linear(8, 24), nn.ReLU(), nn.Linear(24, 8), nn.ReLU(), nn.Linear(8, 2))
    model[0].weight.matrix_view = MatrixView(split_sizes=(8, 8, 8), fused="qkv")  # type: ignore[arg-type, assignment]
    optimizer = build_optimizer(model, "muon", lr=0.1, muon_split_qkv=False, muon_ns_method="standard")
    step(model, optimizer)
    notes = {row.name: row.note for row in optimizer.report().params if row.note}
    assert notes == {"0.weight": "not split; plain", "2.weight": "plain"}


@pytest.mark.usefixtures("in_bfloat16")
@pytest.mark.parametrize(("method", "said"), [("auto", "plain"), ("gram", "plain (not gram)")])
def test_small_matrices_have_a_method_too(method: str, said: str) -> None:
    """In bfloat16 these go step by step together, as experts do, whatever is chosen for one matrix of their shape."""
    shapes = {"small": (64, 64), "large": (256, 512), "experts": (2, 256, 512)}
    params = [nn.Parameter(torch.randn(shape)) for shape in shapes.values()]
    for (name, shape), param in zip(shapes.items(), params, strict=True):
        param.param_info = ParamInfo(name, Role.MATRIX, MatrixView(batch_dims=len(shape) - 2))  # type: ignore[attr-defined]
        param.grad = torch.randn_like(param)
    optimizer = TensorParallelMuon(params, ns_method=method, ns_plan="256x512:gram")
    optimizer.step()
    assert param_notes(optimizer) == {"small": said, "large": "gram", "experts": said}


@pytest.mark.usefixtures("in_float32")
@pytest.mark.parametrize(("method", "said"), [("auto", "plain"), ("gram", "gram"), ("standard", "plain")])
def test_distributed_matrices_have_a_method_too(method: str, said: str) -> None:
    """Which is not kept: what ranks do together follows from the shape."""
    groups = SimpleNamespace(tp=SimpleNamespace(size=lambda: 4, rank=lambda: 0))
    param = nn.Parameter(torch.empty(4096, 64))
    param.param_info = ParamInfo("w", Role.MATRIX, MatrixView(), partition_dim=0)  # type: ignore[attr-defined]
    optimizer = TensorParallelMuon(
        [param], pg_collection=groups, tp_mode="distributed", ns_method=method, fp32_matmul_prec="highest"
    )
    optimizer.planner.plan(param)
    assert param_notes(optimizer) == {"w": f"{said}; distributed over 4 ranks"}
