"""One file in place of a folder, and the commands."""

import json
import pickle
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from megaopt_checkpoint import convert_checkpoint, load_checkpoint, save_checkpoint
from megaopt_checkpoint.plugin import megaopt_commands
from megaopt_testing import run_command
from torch import nn
from training import logical_state, make, same, train, values

from megaopt_core.errors import CheckpointCorruptError, CheckpointError
from megaopt_core.optimizers import MegatronOptimizer

main = partial(run_command, megaopt_commands)


@pytest.fixture
def saved(tmp_path: Path) -> tuple[nn.Module, MegatronOptimizer, Path]:
    """A checkpoint and what it was made from."""
    model, optimizer = make(dtype=torch.bfloat16)
    train(model, optimizer, range(2))
    save_checkpoint(tmp_path / "last", model, optimizer, extra={"step": 2, "rng": torch.get_rng_state()})
    return model, optimizer, tmp_path


@pytest.mark.parametrize("name", ["one.pt", "one.safetensors"])
def test_there_and_back(saved, name):
    """Nothing is lost, and torch's safe loader reads the file."""
    model, optimizer, folder = saved
    if name.endswith("safetensors"):
        pytest.importorskip("safetensors")
    convert_checkpoint(folder / "last", folder / name)
    convert_checkpoint(folder / name, folder / "back")
    other_model, other = make(seed=1, dtype=torch.bfloat16)
    report = load_checkpoint(folder / "back", other_model, other)
    assert report.extra["step"] == 2
    assert same(values(model), values(other_model))
    assert same(logical_state(optimizer), logical_state(other))
    if name.endswith("pt"):
        assert same(torch.load(folder / name, weights_only=True)["model"], values(model))
    assert {entry.name for entry in folder.iterdir()} == {"last", "back", name}


def test_safetensors_is_asked_for(saved, monkeypatch):
    """Where it is missing, with the line that installs it."""
    monkeypatch.setitem(sys.modules, "safetensors", None)
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    with pytest.raises(CheckpointError, match="pip install safetensors"):
        convert_checkpoint(saved[2] / "last", saved[2] / "one.safetensors")


class Hostile:
    def __reduce__(self) -> tuple[Any, ...]:
        return exec, ("import sys; sys.hostile = True",)


def test_files_that_are_refused(saved):
    """Hostile pickles, other files, changed tensors."""
    *_, folder = saved
    torch.save({"model": Hostile()}, folder / "hostile.pt", pickle_module=pickle)
    with pytest.raises(CheckpointError, match="cannot be read as a torch file of plain tensors"):
        convert_checkpoint(folder / "hostile.pt", folder / "out")
    assert not hasattr(sys, "hostile")
    torch.save({"model": {}}, folder / "other.pt")
    with pytest.raises(CheckpointError, match="not a consolidated checkpoint"):
        convert_checkpoint(folder / "other.pt", folder / "out")
    with pytest.raises(CheckpointError, match="no checkpoint and no file at"):
        convert_checkpoint(folder / "gone.pt", folder / "out")
    torch.save({"megaopt": "{}", "model": 3}, folder / "half.pt")
    with pytest.raises(CheckpointError, match="not a consolidated checkpoint"):
        convert_checkpoint(folder / "half.pt", folder / "out")
    for text in ("{", "[]", '{"version": 1}'):
        torch.save({"megaopt": text, "model": {}, "state": {}}, folder / "half.pt")
        with pytest.raises(CheckpointError, match=r"half\.pt"):
            convert_checkpoint(folder / "half.pt", folder / "out")
    convert_checkpoint(folder / "last", folder / "one.pt")
    held = torch.load(folder / "one.pt", weights_only=True)
    held["model"]["norm.weight"].view(-1)[0] += 1
    torch.save(held, folder / "one.pt")
    with pytest.raises(CheckpointCorruptError, match=r"model\.norm\.weight differs from the written data"):
        convert_checkpoint(folder / "one.pt", folder / "out")
    assert not (folder / "out").exists()


def test_commands(saved, capsys):
    """What is inside, as a table and as JSON; damage is one line and status 2."""
    *_, folder = saved
    assert main(["verify-checkpoint", str(folder / "last"), "--tensors"]) == 0
    printed = capsys.readouterr().out
    assert "is complete: every checksum is right" in printed
    assert "optim.state.norm.weight.main_param" in printed
    assert main(["verify-checkpoint", str(folder / "last"), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["ok"], told["world size"], told["extra"]) == (True, 1, ["rng", "step"])
    assert main(["convert", str(folder / "last"), str(folder / "one.pt")]) == 0
    assert capsys.readouterr().out == f"wrote {folder / 'one.pt'}\n"
    before = (folder / "one.pt").stat().st_mtime_ns
    assert main(["convert", str(folder / "last"), str(folder / "one.pt")]) == 2
    expected = f"megaopt: error: {folder / 'one.pt'} is already there; --force replaces it\n"
    assert capsys.readouterr().err == expected
    assert (folder / "one.pt").stat().st_mtime_ns == before
    assert main(["convert", str(folder / "last"), str(folder / "one.pt"), "--force"]) == 0
    assert main(["convert", str(folder / "one.pt"), str(folder / "last")]) == 2
    capsys.readouterr()
    assert main(["convert", str(folder / "last"), str(folder / "one.onnx")]) == 2
    assert capsys.readouterr().err == (
        f"megaopt: error: {folder / 'one.onnx'}: the name must end with .safetensors, .pt or .pth\n"
    )
    assert not (folder / "one.onnx").exists()
    (folder / "last" / "rank-00000.bin").write_bytes(b"")
    assert main(["verify-checkpoint", str(folder / "last")]) == 2
    assert "rank-00000.bin has 0 bytes, it was written with" in capsys.readouterr().err
