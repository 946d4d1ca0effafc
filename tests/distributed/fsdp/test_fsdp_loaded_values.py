"""Owners step from the values that were loaded into the model, whoever loaded them."""

import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from megaopt_core.optimizers import MegatronOptimizer

sys.path.insert(0, str(Path(__file__).parent))

from fsdp_runs import ThirdParty, build, cut_model, mesh_of, train, whole

pytest.importorskip("megaopt_fsdp")
pytest.importorskip("megaopt_checkpoint")
from megaopt_checkpoint import load_checkpoint, save_checkpoint
from megaopt_testing import temporary_plugin
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

pytestmark = [pytest.mark.any_python, pytest.mark.distributed]

type _Load = Callable[[nn.Module, MegatronOptimizer], object]


def ways(path: str, model: nn.Module, optimizer: MegatronOptimizer) -> dict[str, _Load]:
    """Save in every way, and return what loads it."""
    save_checkpoint(f"{path}/ours", model, optimizer)
    dcp.save({"model": model, "optim": optimizer.checkpoint_state()}, checkpoint_id=f"{path}/torch")
    values = {name: value.clone() for name, value in model.state_dict().items()}

    def ours(other: nn.Module, another: MegatronOptimizer) -> None:
        load_checkpoint(f"{path}/ours", other, another)

    def state_alone(other: nn.Module, another: MegatronOptimizer) -> None:
        other.load_state_dict(values)
        load_checkpoint(f"{path}/ours", None, another)

    def together(other: nn.Module, another: MegatronOptimizer) -> None:
        dcp.load({"model": other, "optim": another.checkpoint_state()}, checkpoint_id=f"{path}/torch")

    def state_dict(other: nn.Module, another: MegatronOptimizer) -> None:
        other.load_state_dict(values)
        another.load_state_dict(optimizer.state_dict())

    def functions(other: nn.Module, another: MegatronOptimizer) -> None:
        other.load_state_dict(values)
        set_optimizer_state_dict(other, another, get_optimizer_state_dict(model, optimizer))

    return {each.__name__: each for each in (ours, state_alone, together, state_dict, functions)}


def go_on(rank: int, size: int, path: str, dtype: torch.dtype) -> list[str]:
    """Load in every way and step; return the ways after which the model is another than that of the run."""
    warnings.filterwarnings("ignore", message=".*steps all of a group at once")
    mesh, options = mesh_of(dp=size), {"bf16": dtype is torch.bfloat16}
    with temporary_plugin(ThirdParty(), name="third-party"):
        model = cut_model(mesh, dtype=dtype)
        optimizer = build(model, "newcomer", mesh, **options)
        train(model, optimizer, range(2), mesh)
        loaded = {}
        for way, load in ways(path, model, optimizer).items():
            other = cut_model(mesh, seed=1, dtype=dtype)
            another = build(other, "newcomer", mesh, **options)
            load(other, another)
            train(other, another, range(2, 4), mesh)
            loaded[way] = other
    train(model, optimizer, range(2, 4), mesh)
    expected = {name: whole(param) for name, param in model.named_parameters()}
    return [
        way
        for way, other in loaded.items()
        if not all(torch.equal(whole(param), expected[name]) for name, param in other.named_parameters())
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_owners_go_on_from_what_the_model_was_loaded_with(launch, tmp_path, dtype) -> None:
    """By our functions, by those of torch, and where the state is loaded alone after the model."""
    assert launch(go_on, 2, str(tmp_path), dtype) == [[], []]
