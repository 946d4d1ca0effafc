"""A save whose ranks do not hold all of the state together is refused, and the good checkpoint stays."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from megaopt_checkpoint import load_checkpoint, save_checkpoint, verify_checkpoint
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from megaopt_core import ProcessGroupCollection, build_optimizer
from megaopt_core.errors import CheckpointError
from megaopt_core.optimizers import MegatronOptimizer

pytestmark = [pytest.mark.any_python, pytest.mark.distributed]

STRATEGIES = {"replicated": "adam", "distributed": "adam", "layer_wise": "muon", "fsdp": "muon"}


def made(strategy: str) -> tuple[nn.Module, MegatronOptimizer]:
    """Return a model and its optimizer after a step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    if strategy == "fsdp":
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = build_optimizer(model, STRATEGIES[strategy], lr=1e-2, sharding=strategy)
    model(torch.ones(2, 8)).square().sum().backward()
    optimizer.step()
    return model, optimizer


def save_with_fewer(rank: int, size: int, folder: str, strategy: str, how: str) -> str:
    """Save with all ranks, then with rank 0 alone; return what that raised."""
    model, optimizer = made(strategy)
    path = Path(folder) / "last"
    save_checkpoint(path, model, optimizer, extra="good")
    alone = dist.new_group([0])
    dist.barrier()
    group: Any = alone
    if how == "destroyed":
        dist.destroy_process_group()
        group = None
    if rank:
        return ""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            save_checkpoint(path, model, optimizer, extra="bad", process_group=group)
    except CheckpointError as error:
        assert verify_checkpoint(path).extra == "good"
        return str(error)
    return "saved"


@pytest.mark.parametrize("how", ["destroyed", "group"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_fewer_ranks_than_share_the_state(launch, tmp_path, strategy, how) -> None:
    """After destroy_process_group, or with a group of one rank; where each holds everything, it saves."""
    said, _ = launch(save_with_fewer, 2, str(tmp_path), strategy, how)
    if strategy == "replicated":
        assert said == "saved"
    else:
        assert "do not hold all of the state" in said
        assert "before destroy_process_group(), and without a process_group= of fewer" in said


def save_stages(rank: int, size: int, folder: str, how: str) -> tuple[str, bool]:
    """Save two stages of a pipeline; return an error, and whether a load brings the values back."""
    torch.manual_seed(rank)
    model = nn.ModuleDict({"layers": nn.ModuleList([nn.Linear(4, 4)])})
    group = dist.new_group([0, 1])
    groups = ProcessGroupCollection(pp=group, mp=group)

    def fqn(chunk: int, name: str) -> str:
        return name.replace("layers.0", f"layers.{rank}")

    given = {"fqn": fqn} if how == "named" else {}
    optimizer = build_optimizer(model, "adam", lr=1e-2, pg_collection=groups, **given)
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    before = [param.detach().clone() for param in model.parameters()]
    try:
        if how == "dcp":
            dcp.save({"optim": optimizer.checkpoint_state()}, checkpoint_id=folder)
        else:
            save_checkpoint(f"{folder}/last", model, optimizer, **given)
            optimizer.step()
            load_checkpoint(f"{folder}/last", model, optimizer, **given)
    except CheckpointError as error:
        return str(error), False
    return "", all(map(torch.equal, before, model.parameters()))


@pytest.mark.parametrize("how", ["named", "save", "dcp"])
def test_names_that_mean_other_tensors_on_other_stages(launch, tmp_path, how) -> None:
    """The save refuses and shows the `fqn` to pass; with it everything comes back."""
    for said, same in launch(save_stages, 2, str(tmp_path), how):
        if how == "named":
            assert (said, same) == ("", True)
        else:
            assert "have different tensors of one name: layers.0.bias, layers.0.weight" in said
            assert "fqn=lambda chunk, name: ..." in said
