"""Checkpoints of FSDP2 models hold whole parameters and states: they load on other meshes, whole, and under owners."""

import sys
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from megaopt_core.optimizers import MegatronOptimizer

sys.path.insert(0, str(Path(__file__).parent))

from fsdp_runs import ThirdParty, alone, build, cut_model, mesh_of, train, whole_model

pytest.importorskip("megaopt_fsdp")
pytest.importorskip("megaopt_muon")
from megaopt_checkpoint import load_checkpoint, save_checkpoint
from megaopt_testing import temporary_plugin
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

pytestmark = [pytest.mark.any_python, pytest.mark.distributed]


def save_with_torch(path: str, model: nn.Module, optimizer: MegatronOptimizer) -> None:
    """Save as torch's own functions do."""
    state = {"model": model.state_dict(), "optim": get_optimizer_state_dict(model, optimizer)}
    dcp.save(state, checkpoint_id=path)


def load_with_torch(path: str, model: nn.Module, optimizer: MegatronOptimizer) -> None:
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
    assert first.keys() == second.keys(), sorted(first.keys() ^ second.keys())
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


WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)
WHOLE_EVERYWHERE = StateDictOptions(full_state_dict=True)
FROM_FIRST = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)


def local_state(optimizer: MegatronOptimizer) -> dict[str, torch.Tensor]:
    """Return copies of what this rank keeps; a part of no elements is nothing."""
    return {
        f"{name}/{key}": torch.as_tensor(value).clone()
        for param, name in optimizer.names.items()
        for key, value in optimizer.state[param].items()
        if torch.as_tensor(value).numel()
    }


def told_whole(rank: int, size: int, dims: dict[str, int], kind: str, dtype: torch.dtype) -> dict:
    """Get all of the state, and set it into others in both ways; return what the first rank got."""
    mesh = mesh_of(**dims)
    model = cut_model(mesh, dtype=dtype)
    optimizer = build(model, kind, mesh, bf16=dtype is torch.bfloat16)
    train(model, optimizer, range(2), mesh)
    expected = local_state(optimizer)
    on_first = get_optimizer_state_dict(model, optimizer, options=WHOLE)
    everywhere = get_optimizer_state_dict(model, optimizer, options=WHOLE_EVERYWHERE)
    assert bool(on_first) == (rank == 0)
    for given, options in ((everywhere, WHOLE_EVERYWHERE), (on_first, FROM_FIRST)):
        other = cut_model(mesh, seed=1, dtype=dtype)
        another = build(other, kind, mesh, bf16=dtype is torch.bfloat16)
        set_optimizer_state_dict(other, another, given, options=options)
        assert different(expected, local_state(another)) == []
    return on_first


@pytest.mark.parametrize(
    ("dims", "kind", "dtype"),
    [
        ({"dp": 4}, "adam", torch.float32),
        ({"dp": 4}, "muon", torch.bfloat16),
        ({"dp": 2, "tp": 2}, "muon", torch.float32),
    ],
    ids=str,
)
def test_torch_gets_and_sets_whole_states(launch, dims, kind, dtype) -> None:
    """On the first rank and on all; sent by the first rank or read by each; and one process goes on with them."""
    count = 1
    for size in dims.values():
        count *= size
    first, *_ = launch(told_whole, count, dims, kind, dtype)
    model = whole_model(seed=1, dtype=dtype)
    optimizer = build(model, kind, alone(), bf16=dtype is torch.bfloat16)
    set_optimizer_state_dict(model, optimizer, first, options=WHOLE_EVERYWHERE)
    for param, name in optimizer.names.items():
        for key, value in optimizer.state[param].items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(first["state"][name][key])), (
                name,
                key,
            )
    assert any(
        value.any()
        for key, value in local_state(optimizer).items()
        if key.endswith(("momentum_buffer", "exp_avg"))
    )
