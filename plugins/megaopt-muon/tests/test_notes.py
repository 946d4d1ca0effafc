"""What the report says of each matrix."""

from types import SimpleNamespace

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
    """Before the first step nothing is chosen; after it every large matrix has a method, and vectors have none."""
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
    assert param_notes(optimizer) == {"a": "distributed over 4 ranks", "b": "gram; duplicated over 4 ranks"}
