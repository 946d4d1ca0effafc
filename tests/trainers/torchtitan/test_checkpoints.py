"""torchtitan's checkpoint manager saves and resumes, on the same ranks and on others."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import titan_harness as harness
import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torchtitan.components.optimizer import OptimizersContainer
from torchtitan.trainer import Trainer

from megaopt_core import build_optimizer

pytestmark = pytest.mark.distributed

type Mesh = tuple[int, dict[str, int]]
type Found = tuple[harness.Run, dict[str, torch.Tensor]]

STEPS, SAVED = 4, 2

FSDP2 = (2, {})
HSDP = (4, {"data_parallel_replicate_degree": 2})
FSDP2_TP = (4, {"tensor_parallel_degree": 2})
EP = (4, {"expert_parallel_degree": 2})


class Flat(OptimizersContainer):
    """A container as its users write one, which keeps torchtitan's flat state dicts."""

    @dataclass(kw_only=True, slots=True)
    class Config(OptimizersContainer.Config):
        """No settings."""

    def __init__(self, config: Config, *, model_parts: list[torch.nn.Module]) -> None:
        self.model_parts = model_parts
        self.optimizers = [build_optimizer(model_parts, "adam", lr=8e-4, clip_grad=0.0)]
        torch.optim.Optimizer.__init__(self, list(model_parts[0].parameters()), {})


def _states(made: Trainer) -> dict[str, torch.Tensor]:
    """Return the optimizer's whole state; nothing but on the first rank."""
    options = StateDictOptions(full_state_dict=True)
    (model,), (optimizer,) = made.model_parts, made.optimizers
    found = get_optimizer_state_dict(model, optimizer, options=options)
    return {
        f"{name}/{key}": torch.as_tensor(value).clone()
        for name, values in found.get("state", {}).items()
        for key, value in values.items()
    }


def _run(
    rank: int, size: int, name: str, model: str, given: dict, folder: str, load_step: int = -1
) -> Found | None:
    """Run to the last step; return on the first rank what was logged, and the state before the steps after the save."""
    config = Flat.Config() if name == "flat" else getattr(harness, name)()
    made = harness.trainer(config, model, steps=STEPS, folder=folder, load_step=load_step, **given)
    states = []
    made.optimizers.register_step_pre_hook(lambda *_: states.append(_states(made)))
    run = harness.Run.of(made)
    return (run, states[SAVED - STEPS]) if rank == 0 else None


def _resumed(launch: Callable[..., list[Found]], folder: Path, name: str, model: str, mesh: Mesh) -> Found:
    size, given = mesh
    run, states = launch(_run, size, name, model, given, str(folder), SAVED)[0]
    assert len(run.losses) == STEPS - SAVED
    return run, states


def _differing(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> list[str]:
    assert one.keys() == other.keys()
    return [name for name, value in one.items() if not torch.equal(value, other[name])]


def _goes_on(launch: Callable[..., list[Found]], folder: Path, name: str, model: str, mesh: Mesh) -> Found:
    """Return a run that was resumed, and the state that it found: to the bit those of a run without a break."""
    size, given = mesh
    whole, states = launch(_run, size, name, model, given, str(folder))[0]
    again, found = _resumed(launch, folder, name, model, mesh)
    assert (again.losses, again.rates) == (whole.losses[SAVED:], whole.rates[SAVED:])
    assert _differing(found, states) == _differing(again.weights, whole.weights) == []
    return again, found


@pytest.mark.parametrize("name", ["adam", "muon"])
@pytest.mark.parametrize(("mesh", "other"), [(FSDP2, HSDP), (FSDP2_TP, FSDP2)], ids=["2 to 4", "4 to 2"])
def test_a_run_goes_on_where_it_was_and_elsewhere(launch, tmp_path, name, mesh, other) -> None:
    """To the bit on the same ranks, to 1e-6 on others; states come back to the bit in either case."""
    # torchtitan's fused q/k/v are saved as three in the model's state dict, and as one parameter in the optimizer's.
    again, states = _goes_on(launch, tmp_path, name, "llama3", mesh)
    assert any("wqkv" in key for key in states)
    elsewhere, found = _resumed(launch, tmp_path, name, "llama3", other)
    assert _differing(found, states) == []
    assert elsewhere.rates == again.rates
    assert elsewhere.losses == pytest.approx(again.losses, rel=1e-6)
    assert harness.far(elsewhere.weights, again.weights) < 1e-6


def test_experts_go_on_where_they_were_and_elsewhere(launch, tmp_path) -> None:
    """The states of experts come back to the bit; steps are not compared, since torchtitan multiplies in bfloat16."""
    again, states = _goes_on(launch, tmp_path, "muon", "deepseek_v3", EP)
    elsewhere, found = _resumed(launch, tmp_path, "muon", "deepseek_v3", FSDP2)
    assert _differing(found, states) == []
    assert elsewhere.losses[0] == pytest.approx(again.losses[0], rel=1e-6)


def test_flat_state_dicts_go_on_too(launch, tmp_path) -> None:
    """Groups have names, by which torchtitan flattens."""
    _goes_on(launch, tmp_path, "flat", "llama3", FSDP2)
