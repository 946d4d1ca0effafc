"""Several saves in the background at a time, over ranks that do not write at the same speed."""

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from megaopt_checkpoint import load_checkpoint, save_checkpoint
from megaopt_checkpoint.writer import CheckpointWriter
from torch import nn

from megaopt_core import build_optimizer
from megaopt_core.errors import CheckpointError
from megaopt_core.optimizers import MegatronOptimizer

pytestmark = pytest.mark.any_python


def made() -> tuple[nn.Module, MegatronOptimizer]:
    """Return a model, the same on all ranks, and its optimizer."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    return model, build_optimizer(model, "adam", lr=1e-2)


def advance(model: nn.Module, optimizer: MegatronOptimizer) -> list[torch.Tensor]:
    """Make a step and return copies of the weights."""
    model(torch.ones(2, 8)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return [param.detach().clone() for param in model.parameters()]


def disturb(rank: int, monkeypatch: pytest.MonkeyPatch, *, fails: bool = False) -> None:
    """Let the first write of the second rank be slow, or fail."""
    write, written = CheckpointWriter.write_data, []

    def disturbed(self: CheckpointWriter, *args: Any, **kwargs: Any) -> Any:
        written.append(None)
        if rank == 1 and len(written) == 1:
            if fails:
                raise OSError("the disk is full")
            time.sleep(0.5)
        return write(self, *args, **kwargs)

    monkeypatch.setattr(CheckpointWriter, "write_data", disturbed)


def save_three(rank: int, size: int, folder: str) -> list[bool]:
    """Save three times to different paths at once; return whether each holds what it was given."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        disturb(rank, monkeypatch)
        model, optimizer = made()
        weights, pending = [], []
        for step in range(3):
            weights.append(advance(model, optimizer))
            pending.append(save_checkpoint(f"{folder}/{step}", model, optimizer, extra=step, async_save=True))
        for save in reversed(pending):
            save.result()
    found = []
    for step, kept in enumerate(weights):
        again, loaded = made()
        extra = load_checkpoint(f"{folder}/{step}", again, loaded).extra
        found.append(extra == step and all(map(torch.equal, again.parameters(), kept)))
    return found


@pytest.mark.distributed
def test_saves_to_different_paths_may_be_under_way_together(launch, tmp_path: Path) -> None:
    """They are written one after the other, also where one rank is still busy with the first."""
    assert launch(save_three, 2, str(tmp_path)) == [[True] * 3] * 2


def save_after_failure(rank: int, size: int, folder: str) -> str:
    """Save twice, of which the first fails on one rank; return what is said of the first."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        disturb(rank, monkeypatch, fails=True)
        model, optimizer = made()
        kept = advance(model, optimizer)
        try:
            save_checkpoint(f"{folder}/first", model, optimizer, async_save=True).result()
        except CheckpointError as error:
            words = str(error)
        save_checkpoint(f"{folder}/second", model, optimizer, async_save=True).result()
    again, loaded = made()
    load_checkpoint(f"{folder}/second", again, loaded)
    assert all(map(torch.equal, again.parameters(), kept))
    return words


@pytest.mark.distributed
def test_a_save_that_failed_does_not_take_later_ones_with_it(launch, tmp_path: Path) -> None:
    """All ranks hear of it, and the next save goes through."""
    assert all("the disk is full" in words for words in launch(save_after_failure, 2, str(tmp_path)))
