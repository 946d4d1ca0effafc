"""A model and the optimizer of another one; old checkpoints that cannot be removed."""

import shutil
import warnings
from pathlib import Path

import pytest
import torch
from megaopt_checkpoint import load_checkpoint, retention, save_checkpoint, verify_checkpoint
from torch import nn
from training import make, values

from megaopt_core import build_optimizer
from megaopt_core.errors import CheckpointMismatchError, CheckpointWarning
from megaopt_core.optimizers import MegatronOptimizer


def test_a_model_and_the_optimizer_of_another_one(tmp_path):
    """Refused by saves and loads, before anything is changed."""
    model, optimizer = make()
    other, _ = make(seed=1)
    with pytest.raises(
        CheckpointMismatchError, match=r"steps parameters that are not in this model: .*and 11 more"
    ):
        save_checkpoint(tmp_path / "last", other, optimizer)
    assert not list(tmp_path.iterdir())
    save_checkpoint(tmp_path / "last", model, optimizer)
    before = values(other)
    with pytest.raises(CheckpointMismatchError, match=r"Give the model, with all its chunks"):
        load_checkpoint(tmp_path / "last", other, optimizer)
    assert all(torch.equal(before[name], value) for name, value in values(other).items())


def test_one_chunk_of_a_model(tmp_path):
    """Its optimizer steps both; wrappers and lists of chunks are seen through."""
    chunks = [torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)]
    names = {(index, name): f"{index}.{name}" for index in (0, 1) for name in ("weight", "bias")}
    settings = {"lr": 1e-3, "fqn": lambda index, name: names[index, name]}
    optimizer = build_optimizer(chunks, "adam", **settings)
    with pytest.raises(CheckpointMismatchError, match=r"not in this model: 1\.weight, 1\.bias"):
        save_checkpoint(tmp_path / "last", chunks[:1], optimizer, fqn=settings["fqn"])
    save_checkpoint(tmp_path / "last", chunks, optimizer, fqn=settings["fqn"])
    save_checkpoint(tmp_path / "last", None, optimizer)
    wrapped = torch.nn.Sequential(torch.compile(chunks[0], backend="eager"), chunks[1])
    save_checkpoint(tmp_path / "last", wrapped, optimizer)


@pytest.mark.parametrize("background", [False, True])
def test_an_old_checkpoint_that_stays(tmp_path, monkeypatch, background):
    """The save has succeeded, and says so with a warning that names what it could not remove."""
    model, optimizer = make()
    for step in (1, 2):
        save_checkpoint(tmp_path / f"step-{step}", model, optimizer)

    remove = shutil.rmtree

    def refuse(path, *args, **kwargs):
        if str(path).endswith(".removing") and not kwargs:
            raise PermissionError(13, "Permission denied", str(path))
        remove(path, *args, **kwargs)

    monkeypatch.setattr(retention.shutil, "rmtree", refuse)
    words = r"step-3 was saved, but older checkpoints could not be removed: .*step-1: Permission denied"
    with pytest.warns(CheckpointWarning, match=words):
        _save(tmp_path / "step-3", model, optimizer, background)
    monkeypatch.undo()
    verify_checkpoint(tmp_path / "step-3")
    assert not (tmp_path / "step-1").exists()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        save_checkpoint(tmp_path / "step-4", model, optimizer, keep_last=1)
    assert {entry.name for entry in tmp_path.iterdir()} == {"step-4", ".step-1.removing"}
    shutil.rmtree(tmp_path / ".step-1.removing")


def _save(path: Path, model: nn.Module, optimizer: MegatronOptimizer, background: bool) -> None:
    pending = save_checkpoint(path, model, optimizer, keep_last=2, async_save=background)
    if background:
        pending.result()
