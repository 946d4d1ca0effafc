"""A graph from before a step is refused on every rank, also where another rank has stepped the weight."""

import pytest
import torch
from megaopt_distributed import DistributedDataParallel, DistributedDataParallelConfig
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from megaopt_core import build_optimizer

pytestmark = [pytest.mark.any_python, pytest.mark.distributed]


def kept(rank: int, size: int, optimizer: str, strategy: str, buffers: bool) -> list[int]:
    """Return how many writes to each parameter a step has counted."""
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 4))
    if buffers:
        model = DistributedDataParallel(
            model, DistributedDataParallelConfig(use_distributed_optimizer=strategy == "distributed")
        )
    built = build_optimizer(model, optimizer, lr=0.1, sharding=strategy)
    model(torch.ones(3, 6)).square().sum().backward()
    before = [param._version for param in model.parameters()]
    built.step()
    return [param._version - was for param, was in zip(model.parameters(), before, strict=True)]


@pytest.mark.parametrize("buffers", [False, True], ids=["model", "buffers"])
@pytest.mark.parametrize(("optimizer", "strategy"), [("adam", "distributed"), ("muon", "layer_wise")])
def test_every_weight_that_a_step_changes_is_counted(launch, optimizer, strategy, buffers) -> None:
    """On the rank that steps it, and on the one that is sent it."""
    for counts in launch(kept, 2, optimizer, strategy, buffers):
        assert len(counts) == 6
        assert min(counts) >= 1


def kept_of_dtensors(rank: int, size: int, optimizer: str) -> str:
    """Return what a graph of a tensor-parallel model says that is gone back over after a step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 4))
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("tp",))
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "1": RowwiseParallel()})
    built = build_optimizer(model, optimizer, lr=0.1, pg_collection=mesh)
    loss = model(torch.ones(3, 6)).square().sum()
    loss.backward(retain_graph=True)
    built.step()
    try:
        loss.backward()
    except RuntimeError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("optimizer", ["adam", "muon"])
def test_a_graph_of_cut_weights_is_refused(launch, optimizer) -> None:
    """What counts is the DTensor, whose local part the step has changed."""
    for said in launch(kept_of_dtensors, 2, optimizer):
        assert "modified by an inplace operation" in said
