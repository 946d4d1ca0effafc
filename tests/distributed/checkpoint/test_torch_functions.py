"""Torch's own functions carry the state of sharded optimizers to any number of ranks."""

from collections.abc import Iterable

import pytest
import torch
import torch.distributed.checkpoint as dcp
from long_runs import sometimes
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

from megaopt_core import build_optimizer
from megaopt_core.optimizers import MegatronOptimizer

pytest.importorskip("megaopt_adam")
pytest.importorskip("megaopt_distributed")
pytestmark = [pytest.mark.any_python, pytest.mark.distributed]


def build(seed: int, sharding: str) -> tuple[nn.Sequential, MegatronOptimizer]:
    """Return a model of awkward sizes and its optimizer."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(7, 13), torch.nn.ReLU(), torch.nn.Linear(13, 3))
    return model, build_optimizer(model, "adam", lr=1e-2, clip_grad=0.0, sharding=sharding)


def train(model: nn.Module, optimizer: MegatronOptimizer, steps: Iterable[int]) -> None:
    """Step on gradients that depend on the step alone."""
    for step in steps:
        chance = torch.Generator().manual_seed(step)
        for param in model.parameters():
            param.grad = torch.randn(param.shape, generator=chance)
        optimizer.step()


def values(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return every parameter."""
    return {name: param.detach().clone() for name, param in model.named_parameters()}


def save(rank: int, size: int, folder: str, sharding: str) -> dict[str, torch.Tensor]:
    """Train three steps, save with torch's functions, train three more."""
    model, optimizer = build(0, sharding)
    train(model, optimizer, range(3))
    state = {"model": model.state_dict(), "optim": get_optimizer_state_dict(model, optimizer)}
    dcp.save(state, checkpoint_id=folder)
    train(model, optimizer, range(3, 6))
    return values(model)


def load(rank: int, size: int, folder: str, sharding: str) -> dict[str, torch.Tensor]:
    """Load with torch's functions into another model, and train the last three steps."""
    model, optimizer = build(1, sharding)
    state = {"model": model.state_dict(), "optim": get_optimizer_state_dict(model, optimizer)}
    dcp.load(state, checkpoint_id=folder)
    model.load_state_dict(state["model"])
    set_optimizer_state_dict(model, optimizer, state["optim"])
    optimizer.reload_model_params()
    train(model, optimizer, range(3, 6))
    return values(model)


@pytest.mark.parametrize(
    ("ranks", "strategies"),
    sometimes(
        [
            ((2, 3), ("distributed", "distributed")),
            ((2, 2), ("distributed", "replicated")),
            ((2, 2), ("replicated", "distributed")),
        ],
        [((2, 3), ("distributed", "distributed")), ((2, 2), ("replicated", "distributed"))],
    ),
)
def test_a_run_goes_on_with_the_same_bits(launch, tmp_path, ranks, strategies):
    """From two ranks to three, from sharded to replicated and back."""
    expected = launch(save, ranks[0], str(tmp_path), strategies[0])[0]
    for resumed in launch(load, ranks[1], str(tmp_path), strategies[1]):
        assert all(torch.equal(value, resumed[name]) for name, value in expected.items())
