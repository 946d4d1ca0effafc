"""Checkpoints of FSDP2 models hold whole parameters and states: they load on other meshes, whole, and under owners."""

import sys
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

sys.path.insert(0, str(Path(__file__).parent))

from fsdp_runs import ThirdParty, alone, build, cut_model, mesh_of, train, whole_model

pytest.importorskip("megaopt_fsdp")
pytest.importorskip("megaopt_muon")
from megaopt_checkpoint import load_checkpoint, save_checkpoint
from megaopt_testing import temporary_plugin
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

pytestmark = [pytest.mark.any_python, pytest.mark.distributed]


def save_with_torch(path: str, model, optimizer) -> None:
    """Save as torch's own functions do."""
    state = {"model": model.state_dict(), "optim": get_optimizer_state_dict(model, optimizer)}
    dcp.save(state, checkpoint_id=path)


def load_with_torch(path: str, model, optimizer) -> None:
    """Load as torch's own functions do."""
    state = {"model": model.state_dict(), "optim": get_optimizer_state_dict(model, optimizer)}
    dcp.load(state, checkpoint_id=path)
    model.load_state_dict(state["model"])
    set_optimizer_state_dict(model, optimizer, state["optim"])


WAYS = {"megaopt": (save_checkpoint, load_checkpoint), "torch": (save_with_torch, load_with_torch)}


def saved(rank: int, size: int, runs: dict[str, tuple[str, str]], dims: dict[str, int]) -> None:
    """Train two steps on a mesh and save."""
    mesh = mesh_of(**dims)
    with temporary_plugin(ThirdParty(), name="third-party"):
        for path, (kind, way) in runs.items():
            model = cut_model(mesh)
            optimizer = build(model, kind, mesh)
            train(model, optimizer, range(2), mesh)
            WAYS[way][0](path, model, optimizer)


def moved(rank: int, size: int, runs: dict[str, tuple[str, str]], dims: dict[str, int]) -> None:
    """Load what was saved into a model of other values on another mesh, and save that with our files."""
    mesh = mesh_of(**dims)
    with temporary_plugin(ThirdParty(), name="third-party"):
        for path, (kind, way) in runs.items():
            model = cut_model(mesh, seed=1)
            optimizer = build(model, kind, mesh)
            WAYS[way][1](path, model, optimizer)
            save_checkpoint(f"{path}-moved", model, optimizer)


def owned(rank: int, size: int, runs: dict[str, tuple[str, str]]) -> None:
    """Load what was saved into whole models whose matrices have owners, and save that."""
    with temporary_plugin(ThirdParty(), name="third-party"):
        for path, (kind, _) in runs.items():
            model = whole_model(seed=1)
            optimizer = build(model, kind, sharding="layer_wise")
            load_checkpoint(path, model, optimizer)
            save_checkpoint(f"{path}-owned", model, optimizer)


def in_one_process(path: str, kind: str) -> dict[str, torch.Tensor]:
    """Return everything that a checkpoint holds, as one process loads it."""
    model = whole_model(seed=2)
    optimizer = build(model, kind, alone())
    load_checkpoint(path, model, optimizer)
    found = {f"model/{name}": param.detach().clone() for name, param in model.named_parameters()}
    for param, name in optimizer.names.items():
        for key, value in optimizer.state[param].items():
            found[f"{name}/{key}"] = torch.as_tensor(value).clone()
    return found


def different(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> list[str]:
    """Return the names of what is not the same bit for bit."""
    assert list(first) == list(second)
    return [name for name, value in first.items() if not torch.equal(value, second[name])]


def test_state_moves_between_meshes_bit_for_bit(launch, tmp_path) -> None:
    """From four ranks to two by two, to one process and to owners of whole models: our files, and torch's functions."""
    kinds = ("muon", "newcomer", "adam")
    ours = {str(tmp_path / kind): (kind, "megaopt") for kind in kinds}
    theirs = {str(tmp_path / f"{kind}-torch"): (kind, "torch") for kind in ("muon", "adam")}
    launch(saved, 4, ours | theirs, {"dp": 4})
    launch(moved, 4, ours | theirs, {"dp": 2, "tp": 2})
    launch(owned, 2, {path: run for path, run in ours.items() if run[0] != "adam"})
    with temporary_plugin(ThirdParty(), name="third-party"):
        for kind in kinds:
            path = str(tmp_path / kind)
            expected = in_one_process(path, kind)
            assert any(value.any() for name, value in expected.items() if not name.startswith("model/"))
            assert different(expected, in_one_process(f"{path}-moved", kind)) == []
            if kind != "newcomer":
                assert different(expected, in_one_process(f"{path}-torch-moved", kind)) == []
            if kind != "adam":
                assert different(expected, in_one_process(f"{path}-owned", kind)) == []
