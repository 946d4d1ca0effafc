"""Parameters with fewer rows than there are ranks: those that have nothing of them tell torch of them all the same."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from megaopt_core import build_optimizer
from megaopt_core.optimizers import MegatronOptimizer

sys.path.insert(0, str(Path(__file__).parent))

pytest.importorskip("megaopt_fsdp")
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

pytestmark = [pytest.mark.any_python, pytest.mark.distributed]

FULL = StateDictOptions(full_state_dict=True)
STEPS = {"layer.weight": 4.0, "gain": 3.0, "head.weight": 4.0}


class Scaled(nn.Module):
    """A gain of one element, and a head of three rows."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8, bias=False)
        self.gain = nn.Parameter(torch.ones(1))
        self.head = nn.Linear(8, 3, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return what the head makes of the layer's output, scaled."""
        return self.head(self.gain * self.layer(x))


def made(axes: dict[str, int]) -> tuple[nn.Module, MegatronOptimizer]:
    """Return a cut model and its optimizer."""
    torch.manual_seed(0)
    model = Scaled()
    mesh = init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
    fully_shard(model, mesh=mesh)
    return model, build_optimizer(model, "adam", lr=1e-2, sharding="fsdp")


def trained(axes: dict[str, int]) -> tuple[nn.Module, MegatronOptimizer]:
    """Return both after four steps, of which the gain takes three: numbers of parameters differ."""
    model, optimizer = made(axes)
    for step in range(4):
        model(torch.ones(4, 8)).square().sum().backward()
        if step == 1:
            model.gain.grad = None
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def save(rank: int, size: int, path: str) -> None:
    """Write what one process has."""
    torch.save(get_optimizer_state_dict(*trained({"dp": size}), options=FULL), path)


def load(rank: int, size: int, path: str, axes: dict[str, int]) -> tuple[bool, dict[str, Any]]:
    """Load it into a new optimizer; return whether it is there again, and the step counts that this rank shows."""
    saved = torch.load(path)
    model, optimizer = made(axes)
    set_optimizer_state_dict(model, optimizer, saved, options=FULL)
    again = get_optimizer_state_dict(model, optimizer, options=FULL)["state"]
    equal = all(
        torch.equal(value, again[name][key])
        for name, values in saved["state"].items()
        for key, value in values.items()
    )
    shown = optimizer.state_dict()
    names = [name for group in shown["param_groups"] for name in group["param_names"]]
    return equal, {name: float(shown["state"][index]["step"]) for index, name in enumerate(names)}


@pytest.mark.parametrize(
    "axes",
    [{"dp": 2}, {"dp": 4}, {"dp_replicate": 2, "dp": 2}],
    ids=lambda axes: "x".join(map(str, axes.values())),
)
def test_a_full_state_dict_loads_where_a_rank_has_no_elements(launch, tmp_path, axes: dict[str, int]) -> None:
    """Into a new optimizer, by torch's function, which wants the same keys on all ranks; and all show equal numbers."""
    path, size = str(tmp_path / "optimizer.pt"), 4 if axes != {"dp": 2} else 2
    launch(save, 1, path)
    assert launch(load, size, path, axes) == [(True, STEPS)] * size
