"""A script as users write it: FSDP2, torch's `get_state_dict`, `dcp.save`, and nothing behind that."""

import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from megaopt_core import build_optimizer


def build(kind: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a sharded model and its optimizer."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(64, 32), nn.Linear(32, 32), nn.LayerNorm(32), nn.Linear(32, 64))
    mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, build_optimizer(model, kind, lr=1e-2)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> float:
    """Take steps, and return the last loss."""
    loss = torch.zeros(())
    for step in steps:
        tokens = torch.randint(0, 64, (4, 8), generator=torch.Generator().manual_seed(step))
        loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()


def main(kind: str, folder: str) -> None:
    """Train, save, load into a new run, and compare how both go on."""
    dist.init_process_group("gloo")
    model, optimizer = build(kind)
    train(model, optimizer, range(3))
    model_state, optimizer_state = get_state_dict(model, optimizer)
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder)
    expected = train(model, optimizer, range(3, 6))

    model, optimizer = build(kind)
    model_state, optimizer_state = get_state_dict(model, optimizer)
    dcp.load({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)
    is_same = train(model, optimizer, range(3, 6)) == expected
    sys.stdout.write("the same loss\n" if is_same else "another loss\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
