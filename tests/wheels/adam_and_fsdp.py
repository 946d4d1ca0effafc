"""Trains a model that FSDP2 has cut with the core, Adam and megaopt-fsdp alone, on two ranks: saves and resumes.

What holds the states is torch's own `get_optimizer_state_dict`, and `torch.distributed.checkpoint`.
"""

import sys
import tempfile
import warnings
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.multiprocessing.spawn import ProcessExitedException

from megaopt_core import build_optimizer

SEVEN = {
    f"megaopt-{name}" for name in ("core", "adam", "fsdp", "layerwise", "distributed", "guards", "checkpoint")
}


def make() -> tuple[torch.nn.Module, Any]:
    """Return a model that is cut over the ranks, and its optimizer."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 8))
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    return model, build_optimizer(model, "adam", lr=1e-2, sharding="fsdp")


def train(model: torch.nn.Module, optimizer: Any, seeds: range) -> None:
    """Step a few times, each with a batch of its own."""
    for seed in seeds:
        batch = torch.randn(4, 8, generator=torch.Generator().manual_seed(seed))
        optimizer.zero_grad()
        (model(batch) - batch).square().mean().backward()
        optimizer.step()


def run(rank: int, folder: str) -> None:
    """Train, save, and go on in a new run as in the old one."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    model, optimizer = make()
    train(model, optimizer, range(3))
    saved = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    dcp.save(saved, checkpoint_id=f"{folder}/run")
    other, again = make()
    loaded = dict(zip(("model", "optimizer"), get_state_dict(other, again), strict=True))
    dcp.load(loaded, checkpoint_id=f"{folder}/run")
    set_state_dict(other, again, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"])
    for each in ((model, optimizer), (other, again)):
        train(*each, range(3, 6))
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    if not all(torch.equal(one.to_local(), two.to_local()) for one, two in pairs):  # type: ignore[attr-defined]
        sys.exit("a run that was resumed goes on otherwise")
    Path(folder, f"{rank}.done").touch()
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    """Check all of it."""
    ours = {each.metadata["Name"] for each in distributions() if each.metadata["Name"].startswith("megaopt")}
    if ours != SEVEN:
        sys.exit(f"{ours} are installed, not {SEVEN}")
    with tempfile.TemporaryDirectory() as folder:
        try:
            torch.multiprocessing.spawn(run, (folder,), nprocs=2)
        except ProcessExitedException as ended:
            # Python may end before a thread of torch's gloo has (pytorch issue 190489).
            if ended.signal_name != "SIGABRT" or not all(
                Path(folder, f"{rank}.done").exists() for rank in (0, 1)
            ):
                raise
    print("core, Adam and fsdp alone: saved by torch's functions, resumed on two ranks")


if __name__ == "__main__":
    main()
