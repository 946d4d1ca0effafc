"""torchtitan's checkpoint manager saves and resumes."""

from dataclasses import dataclass

import pytest
import titan_harness as harness
import torch
from torchtitan.components.optimizer import OptimizersContainer

from megaopt_core import build_optimizer

pytestmark = pytest.mark.distributed


class Flat(OptimizersContainer):
    """A container as its users write one, which keeps torchtitan's flat state dicts."""

    @dataclass(kw_only=True, slots=True)
    class Config(OptimizersContainer.Config):
        """No settings."""

    def __init__(self, config: Config, *, model_parts: list[torch.nn.Module]) -> None:
        self.model_parts = model_parts
        self.optimizers = [build_optimizer(model_parts, "adam", lr=8e-4, clip_grad=0.0)]
        torch.optim.Optimizer.__init__(self, list(model_parts[0].parameters()), {})


def _run(rank: int, size: int, name: str, folder: str, load_step: int = -1) -> list:
    config = Flat.Config() if name == "flat" else getattr(harness, name)()
    run = harness.Run.of(
        harness.trainer(config, steps=4, folder=folder, load_step=load_step, spmd_backend="partial_dtensor")
    )
    return [run.losses, run.rates, run.weights]


@pytest.mark.parametrize("name", ["adam", "muon", "flat"])
def test_a_run_goes_on_exactly(launch, tmp_path, name) -> None:
    """Its fused q/k/v are saved as three in the model's state dict, and as one parameter in the optimizer's."""
    losses, rates, weights = launch(_run, 1, name, str(tmp_path))[0]
    again = launch(_run, 1, name, str(tmp_path), 2)[0]
    assert again[:2] == [losses[2:], rates[2:]]
    assert all(torch.equal(value, weights[key]) for key, value in again[2].items())
