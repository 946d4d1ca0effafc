"""Checkpoints of models that are cut into DTensors hold whole parameters: they load cut otherwise, and whole."""

import itertools

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from dtensor_models import build, cut_model, mesh_of, train, whole, whole_model
from long_runs import sometimes
from megaopt_checkpoint import load_checkpoint, save_checkpoint
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

from megaopt_core import ProcessGroupCollection
from megaopt_core.optimizers import MegatronOptimizer

pytest.importorskip("megaopt_adam")
pytestmark = [pytest.mark.any_python, pytest.mark.distributed]


def goes_on(model: nn.Module, optimizer: MegatronOptimizer) -> dict[str, torch.Tensor]:
    """Train two more steps and return all parameters whole."""
    train(model, optimizer, range(2, 4))
    return {name: whole(param) for name, param in model.named_parameters()}


def tensor_parallel_pair(seed: int, kind: str) -> tuple[nn.Module, MegatronOptimizer]:
    """Return a cut model over all ranks and its optimizer."""
    mesh = mesh_of(tp=dist.get_world_size())
    model = cut_model(mesh, seed)
    return model, build(model, kind, mesh)


def save_cut(rank: int, size: int, kind: str, save: str, path: str) -> dict[str, torch.Tensor]:
    """Train two steps, save, and go on."""
    model, optimizer = tensor_parallel_pair(0, kind)
    train(model, optimizer, range(2))
    WAYS[save][0](path, model, optimizer)
    return goes_on(model, optimizer)


def load_cut(rank: int, size: int, kind: str, load: str, path: str) -> dict[str, torch.Tensor]:
    """Load into another model and go on."""
    model, optimizer = tensor_parallel_pair(1, kind)
    WAYS[load][1](path, model, optimizer)
    return goes_on(model, optimizer)


def save_with_torch(path: str, model: nn.Module, optimizer: MegatronOptimizer) -> None:
    """Save as torch's own functions do."""
    state = {"model": model.state_dict(), "optim": get_optimizer_state_dict(model, optimizer)}
    dcp.save(state, checkpoint_id=path)


def load_with_torch(path: str, model: nn.Module, optimizer: MegatronOptimizer) -> None:
    """Load as torch's own functions do."""
    state = {"model": model.state_dict(), "optim": get_optimizer_state_dict(model, optimizer)}
    dcp.load(state, checkpoint_id=path)
    model.load_state_dict(state["model"])
    set_optimizer_state_dict(model, optimizer, state["optim"])


WAYS = {"megaopt": (save_checkpoint, load_checkpoint), "torch": (save_with_torch, load_with_torch)}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.filterwarnings(
    "ignore:settings that change nothing here. muon_tp_mode"
)  # nothing is cut in one process
@pytest.mark.parametrize(
    ("kind", "way"),
    sometimes(
        itertools.product(["adam", "muon distributed"], WAYS),
        always=[("muon distributed", "megaopt")],
    ),
)
def test_a_run_goes_on_cut_and_whole(launch, tmp_path, kind, way) -> None:
    """What two ranks saved loads into the whole model in one process, and from there into two ranks again."""
    pytest.importorskip(f"megaopt_{kind.split()[0]}")
    cut, back = str(tmp_path / "cut"), str(tmp_path / "back")
    expected, _ = launch(save_cut, 2, kind, way, cut)
    model = whole_model(1)
    optimizer = build(model, kind, ProcessGroupCollection())
    WAYS[way][1](cut, model, optimizer)
    WAYS[way][0](back, model, optimizer)
    resumed = [
        goes_on(model, optimizer),
        *launch(load_cut, 2, kind, way, cut),
        *launch(load_cut, 2, kind, way, back),
    ]
    for values in resumed:
        for name, value in expected.items():
            torch.testing.assert_close(values[name], value, rtol=0, atol=1e-5, msg=name)
