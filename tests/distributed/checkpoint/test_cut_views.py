"""A view of the whole of a weight that ranks hold parts of is stored as that, and loads on any number of ranks."""

import pytest
import torch
import torch.distributed as dist
from launch import launch
from torch import nn

from megaopt_core import MatrixView, ProcessGroupCollection, build_optimizer
from megaopt_core.optimizers import MegatronOptimizer

pytest.importorskip("megaopt_muon")
files = pytest.importorskip("megaopt_checkpoint")
pytestmark = [pytest.mark.any_python, pytest.mark.distributed]


def built(ranks: int, routing: str | None = None) -> tuple[nn.Module, MegatronOptimizer]:
    """Return a weight of fused matrices, or a rank's part of it, and its optimizer."""
    model = nn.Sequential(nn.Linear(8, 24 // ranks, bias=False))
    weight = model[0].weight
    weight.matrix_view = MatrixView(split_sizes=(8, 8, 8))
    groups = None
    if ranks > 1:
        weight.tensor_model_parallel, weight.partition_dim = True, 0
        groups = ProcessGroupCollection(tp=dist.group.WORLD)
    weight.grad = torch.ones_like(weight)
    settings = {"lr": 0.1, **({"muon_tp_mode": "duplicated"} if ranks > 1 else {})}
    return model, build_optimizer(model, "muon", pg_collection=groups, routing=routing, **settings)


def saved_and_loaded(rank: int, size: int, folder: str) -> bool:
    """Save on ranks that hold parts, and load there with and without the stored routing."""
    model, optimizer = built(size)
    optimizer.step()
    files.save_checkpoint(folder, model, optimizer)
    for routing in (None, folder):
        model, optimizer = built(size, routing)
        files.load_checkpoint(folder, model, optimizer)
    return True


def test_a_view_of_the_whole_is_no_damage_in_a_part(tmp_path) -> None:
    """Two ranks save and load, and one loads what they saved, also by its routing."""
    folder = str(tmp_path / "saved")
    assert launch(saved_and_loaded, 2, folder) == [True, True]
    for routing in (None, folder):
        model, optimizer = built(1, routing)
        files.load_checkpoint(folder, model, optimizer)
