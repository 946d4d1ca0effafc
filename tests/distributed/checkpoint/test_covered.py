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
from megaopt_core.errors import CheckpointError, RoutingError
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


def staged(rank: int, axis: str, named: bool, routing: str | None = None) -> tuple[nn.Module, Any, dict]:
    """Return a stage of a pipeline, or a rank's experts, each numbered from 0, with buffers that all have alike."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"gate": nn.BatchNorm1d(4, affine=axis == "ep")})
    torch.manual_seed(rank)
    model["layers"] = nn.ModuleList([nn.Linear(4, 4)])
    group = dist.new_group([0, 1])
    groups = {"pp": {"pp": group, "mp": group}, "ep": {"ep": group, "dp": group}}[axis]
    for param in model["layers"].parameters() if axis == "ep" else ():
        param.allreduce = False

    def fqn(chunk: int, name: str) -> str:
        return name.replace("layers.0", f"layers.{rank}")

    given = {"fqn": fqn} if named else {}
    pgs = ProcessGroupCollection(**groups)
    return model, build_optimizer(model, "adam", lr=1e-2, pg_collection=pgs, routing=routing, **given), given


def save_stages(rank: int, size: int, folder: str, axis: str, how: str) -> tuple[str, bool]:
    """Save what is numbered locally; return an error, and whether a load brings the values back."""
    path = f"{folder}/last"
    try:
        if how == "routing":
            model, optimizer, given = staged(rank, axis, named=True)
            save_checkpoint(path, model, optimizer, **given)
            staged(rank, axis, named=True, routing=path)
        model, optimizer, given = staged(
            rank, axis, named=how == "named", routing=path if how == "routing" else None
        )
        for param in model.parameters():
            param.grad = torch.ones_like(param)
        optimizer.step()
        before = [param.detach().clone() for param in model.parameters()]
        if how == "dcp":
            dcp.save({"optim": optimizer.checkpoint_state()}, checkpoint_id=folder)
        else:
            save_checkpoint(path, model, optimizer, **given)
            optimizer.step()
            load_checkpoint(path, model, optimizer, **given)
    except (CheckpointError, RoutingError) as error:
        return str(error), False
    return "", all(map(torch.equal, before, model.parameters()))


@pytest.mark.parametrize("how", ["named", "save", "dcp", "routing"])
@pytest.mark.parametrize("axis", ["pp", "ep"])
def test_names_that_mean_other_tensors_on_other_ranks(launch, tmp_path, axis, how) -> None:
    """Refused with the `fqn` to pass, with which everything comes back, and buffers that are alike are one tensor."""
    for said, same in launch(save_stages, 2, str(tmp_path), axis, how):
        if how == "named":
            assert (said, same) == ("", True)
        else:
            assert "have different tensors of one name: layers.0.bias, layers.0.weight." in said
            assert "fqn=lambda chunk, name: ..." in said
            assert said.startswith(f"routing='{tmp_path}/last' goes by name") is (how == "routing")


def save_frozen_experts(rank: int, size: int, folder: str) -> str:
    """Save experts that nothing steps, with another on each rank under one name."""
    model, _, _ = staged(rank, "ep", named=False)
    model["layers"].requires_grad_(False)
    group = dist.new_group([0, 1])
    optimizer = build_optimizer(
        model, "adam", lr=1e-2, pg_collection=ProcessGroupCollection(ep=group, dp=group)
    )
    try:
        save_checkpoint(folder, model, optimizer)
    except CheckpointError as error:
        return str(error)
    return "saved"


def test_frozen_experts_of_one_name(launch, tmp_path) -> None:
    """The model's values would be mixed up all the same."""
    for said in launch(save_frozen_experts, 2, str(tmp_path / "last")):
        assert "have different tensors of one name: layers.0.bias, layers.0.weight." in said
