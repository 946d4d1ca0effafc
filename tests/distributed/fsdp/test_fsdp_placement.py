"""Models that `fully_shard` has cut train offloaded to the bits of training in place."""

import sys
import warnings
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

from fsdp_runs import build, cut_model, installed, mesh_of, train, whole

pytest.importorskip("megaopt_fsdp")
pytest.importorskip("megaopt_device")
pytest.importorskip("megaopt_muon")
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

pytestmark = [pytest.mark.any_python, pytest.mark.distributed]

OFFLOAD = {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 1.0}


def offloaded_runs(rank: int, size: int, kinds: list[str]) -> dict[str, list[str]]:
    """Train in place and offloaded, and return the names of what differs, by optimizer."""
    warnings.simplefilter("ignore")  # a model on the CPU gains nothing
    mesh, differing = mesh_of(dp=size), {}
    for kind in kinds:
        runs = []
        for settings in ({}, OFFLOAD, {**OFFLOAD, "overlap_cpu_optimizer_d2h_h2d": True}):
            model = cut_model(mesh)
            optimizer = build(model, kind, mesh, **settings)
            norms = train(model, optimizer, range(5), mesh)
            runs.append(
                {name: whole(param) for name, param in model.named_parameters()}
                | {"norms": torch.tensor(norms)}
            )
        differing[kind] = [
            name for run in runs[1:] for name, value in run.items() if not torch.equal(value, runs[0][name])
        ]
    return differing


def test_offloaded_shards_are_stepped_as_in_place(launch) -> None:
    """Elements on the CPU; of a split step the first and third part there, what is transformed with its owner."""
    for found in launch(offloaded_runs, 2, ["adam", "muon"]):
        assert found == {"adam": [], "muon": []}


def told_offloaded(rank: int, size: int) -> list[str]:
    """Get whole states of what is offloaded, set them elsewhere, and return what differs."""
    warnings.simplefilter("ignore")
    mesh, differing = mesh_of(dp=size), []
    options = StateDictOptions(full_state_dict=True)
    for kind in ("adam", "muon", *(["soap"] if "soap" in installed() else [])):
        model, other = cut_model(mesh), cut_model(mesh, seed=1)
        optimizer, another = build(model, kind, mesh, **OFFLOAD), build(other, kind, mesh)
        train(model, optimizer, range(2), mesh)
        set_optimizer_state_dict(
            other, another, get_optimizer_state_dict(model, optimizer, options=options), options=options
        )
        for (param, name), theirs in zip(optimizer.names.items(), another.names, strict=True):
            for key, value in optimizer.state[param].items():
                if not torch.equal(torch.as_tensor(value), torch.as_tensor(another.state[theirs][key])):
                    differing.append(f"{kind}: {name}/{key}")
        if kind != "adam":
            assert any(row.sent for row in optimizer.report().parts), kind
    return differing


def test_torch_gets_whole_states_of_what_is_offloaded(launch) -> None:
    """Bit for bit, into an optimizer that is not."""
    assert launch(told_offloaded, 2) == [[], []]
