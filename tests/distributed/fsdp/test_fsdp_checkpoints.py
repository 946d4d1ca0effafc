"""Checkpoints of FSDP2 models hold whole parameters and states: they load on other meshes, whole, and under owners."""

import math
import sys
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from long_runs import sometimes
from torch import nn

from megaopt_core.optimizers import MegatronOptimizer

sys.path.insert(0, str(Path(__file__).parent))

from fsdp_runs import ThirdParty, alone, build, cut_model, installed, mesh_of, train, whole_model

pytest.importorskip("megaopt_fsdp")
pytest.importorskip("megaopt_muon")
from megaopt_checkpoint import load_checkpoint, save_checkpoint
from megaopt_testing import temporary_plugin
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from megaopt_core.errors import StateDictError

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


@pytest.mark.parametrize(
    "kinds",
    [("muon", "newcomer", "adam"), pytest.param(("soap", "adaptive_muon"), marks=pytest.mark.long)],
    ids=" ".join,
)
def test_state_moves_between_meshes_bit_for_bit(launch, tmp_path, kinds) -> None:
    """From four ranks to two by two, to one process and to owners of whole models: our files, and torch's functions."""
    kinds = [kind for kind in kinds if kind in installed()]
    ours = {str(tmp_path / kind): (kind, "megaopt") for kind in kinds}
    theirs = {str(tmp_path / f"{kind}-torch"): (kind, "torch") for kind in kinds}
    launch(saved, 4, ours | theirs, {"dp": 4})
    launch(moved, 4, ours | theirs, {"dp": 2, "tp": 2})
    launch(owned, 2, {path: run for path, run in ours.items() if run[0] != "adam"})
    with temporary_plugin(ThirdParty(), name="third-party"):
        for kind in kinds:
            path = str(tmp_path / kind)
            expected = in_one_process(path, kind)
            assert any(value.any() for name, value in expected.items() if not name.startswith("model/"))
            assert different(expected, in_one_process(f"{path}-moved", kind)) == []
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


def told_whole(rank: int, size: int, dims: dict[str, int], kind: str, dtype: torch.dtype, steps: int) -> dict:
    """Get all of the state, and set it into others in both ways; return what the first rank got."""
    warnings.filterwarnings("ignore", message="'as_one' steps all of a group at once")
    mesh = mesh_of(**dims)
    is_bf16 = dtype is torch.bfloat16
    with temporary_plugin(ThirdParty(), name="third-party"):
        model = cut_model(mesh, dtype=dtype)
        optimizer = build(model, kind, mesh, bf16=is_bf16)
        train(model, optimizer, range(steps), mesh)
        expected = local_state(optimizer)
        on_first = get_optimizer_state_dict(model, optimizer, options=WHOLE)
        everywhere = get_optimizer_state_dict(model, optimizer, options=WHOLE_EVERYWHERE)
        assert bool(on_first) == (rank == 0)
        assert different(expected, local_state(optimizer)) == [], "telling changes nothing"
        for given, options in ((everywhere, WHOLE_EVERYWHERE), (on_first, FROM_FIRST)):
            other = cut_model(mesh, seed=1, dtype=dtype)
            another = build(other, kind, mesh, bf16=is_bf16)
            set_optimizer_state_dict(other, another, given, options=options)
            assert different(expected, local_state(another)) == []
    return on_first


@pytest.mark.parametrize(
    ("dims", "kind", "dtype"),
    [
        ({"dp": 2, "tp": 2}, "muon", torch.float32),
        ({"dp": 2}, "newcomer", torch.bfloat16),
        ({"dp": 2}, "as_one", torch.float32),
        *sometimes(
            [
                ({"dp": 2}, "soap", torch.float32),
                ({"dp": 2}, "adaptive_muon", torch.float32),
                ({"dp": 4}, "adam", torch.float32),
                ({"dp": 4}, "muon", torch.bfloat16),
                ({"dp_replicate": 2, "dp": 2}, "soap", torch.bfloat16),
                ({"dp": 2, "tp": 2}, "newcomer", torch.float32),
            ],
            always=[({"dp": 4}, "adam", torch.float32)],
        ),
    ],
    ids=str,
)
def test_torch_gets_and_sets_whole_states(launch, dims, kind, dtype) -> None:
    """On the first rank and on all; sent by the first rank or read by each; and one process goes on with them."""
    if kind not in installed():
        pytest.skip(f"the plugin of {kind} is not installed")
    first, *_ = launch(told_whole, math.prod(dims.values()), dims, kind, dtype, 2)
    model = whole_model(seed=1, dtype=dtype)
    with temporary_plugin(ThirdParty(), name="third-party"):
        optimizer = build(model, kind, alone(), bf16=dtype is torch.bfloat16)
        set_optimizer_state_dict(model, optimizer, first, options=WHOLE_EVERYWHERE)
    told = {
        f"{name}/{key}": torch.as_tensor(value).clone()
        for name, values in first["state"].items()
        for key, value in values.items()
    }
    assert different(told, local_state(optimizer)) == []
    assert any(
        value.any()
        for key, value in local_state(optimizer).items()
        if key.endswith(("momentum_buffer", "exp_avg", "average"))
    )


MISSING = "blocks.0.down.weight"


def loads_without_one(rank: int, size: int, kind: str) -> None:
    """Load states that lack those of one parameter, strictly and not."""
    mesh = mesh_of(dp=size)
    with temporary_plugin(ThirdParty(), name="third-party"):
        model, other = cut_model(mesh), cut_model(mesh, seed=1)
        optimizer, another = build(model, kind, mesh), build(other, kind, mesh)
    train(model, optimizer, range(2), mesh)
    train(other, another, range(5, 6), mesh)
    lacking = optimizer.state_dict()
    (index,) = (
        index
        for group in lacking["param_groups"]
        for index, name in zip(group["params"], group["param_names"], strict=True)
        if name == MISSING
    )
    del lacking["state"][index]
    before, saved_state = local_state(another), local_state(optimizer)
    with pytest.raises(StateDictError, match=f"no state of '{MISSING}'"):
        another.load_state_dict(lacking)
    assert different(before, local_state(another)) == []
    another.load_state_dict(lacking, strict=False)
    kept = {key: before[key] for key in before if key.startswith(MISSING)}
    expected = {key: value for key, value in saved_state.items() if not key.startswith(MISSING)} | kept
    assert different(expected, local_state(another)) == []


@pytest.mark.parametrize("kind", ["adam", "muon", "newcomer"])
def test_states_that_lack_a_parameter_are_refused_by_name(launch, kind) -> None:
    """On every rank, and nothing changes; without `strict` the others are loaded, and that one keeps what it has."""
    launch(loads_without_one, 2, kind)


def loads_differ(rank: int, size: int) -> None:
    """Give each rank another state dict."""
    mesh = mesh_of(dp=size)
    with temporary_plugin(ThirdParty(), name="third-party"):
        model = cut_model(mesh)
        optimizer = build(model, "newcomer", mesh)
    train(model, optimizer, range(2), mesh)
    given, before = optimizer.state_dict(), local_state(optimizer)
    if rank == 1:
        for values in given["state"].values():
            values.pop("average", None)
    with pytest.raises(StateDictError, match=r"ranks load different states, such as '.*average'"):
        optimizer.load_state_dict(given)
    assert different(before, local_state(optimizer)) == []


def test_ranks_that_load_different_states_hear_of_it(launch) -> None:
    """All of them, before anything changes."""
    launch(loads_differ, 2)
