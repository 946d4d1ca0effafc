"""What one rank alone cannot step stops the step of all that share parameters out with it, before anything moves."""

import copy
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from megaopt_checkpoint import load_checkpoint, save_checkpoint
from megaopt_distributed import DistributedDataParallel, DistributedDataParallelConfig
from models import values_of
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from megaopt_core import build_optimizer
from megaopt_core.errors import MegaoptError, OwnershipError

pytestmark = [pytest.mark.any_python, pytest.mark.distributed]


def unfrozen_on_one(rank: int, size: int, settings: Mapping[str, Any], staged: bool) -> tuple[str, bool]:
    """Unfreeze a layer on rank 1 after one step; return what the next step raises, and whether anything moved."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 4))
    model[0].requires_grad_(False)
    config = DistributedDataParallelConfig(use_distributed_optimizer=True, bucket_size=40)
    wrapped = DistributedDataParallel(model, config)
    optimizer = build_optimizer(wrapped, "adam", lr=0.1, sharding="distributed", **settings)

    def backward():
        wrapped(torch.ones(3, 6)).square().sum().backward()

    backward()
    optimizer.step()
    optimizer.zero_grad()
    backward()
    if rank == 1:
        model[0].weight.requires_grad_(True)
        model[0].weight.grad = torch.ones(8, 6)
    before = values_of(model)
    try:
        optimizer.prepare_grads() if staged else optimizer.step()
    except OwnershipError as error:
        after = values_of(model)
        return str(error), all(torch.equal(before[name], after[name]) for name in before)
    return "no error", False


@pytest.mark.parametrize("staged", [False, True], ids=["step", "prepare_grads"])
@pytest.mark.parametrize("settings", [{"clip_grad": 0.0}, {"clip_grad": 1.0}], ids=str)
def test_all_ranks_raise(launch, settings, staged):
    """Also in fp32 without clipping, where no norm is exchanged."""
    (other, other_still), (own, own_still) = launch(unfrozen_on_one, 2, settings, staged, group_timeout=250.0)
    assert "'0.weight' trains since the optimizer was built" in own
    assert "another rank cannot step what trains now" in other
    assert own_still
    assert other_still


def unfrozen_under_torchs(rank: int, size: int, frozen_first: bool) -> tuple[str, list[float]]:
    """Unfreeze, save, go on; resume and go on: return an error, and the differences between both."""
    torch.manual_seed(0)
    inputs = torch.randn(4, 6)[rank::size]

    def made() -> tuple[nn.Module, nn.Module, Any]:
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 4))
        model[0].requires_grad_(not frozen_first)
        wrapped = nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
        model[0].requires_grad_(False)
        return model, wrapped, build_optimizer(wrapped, "adam", lr=0.1)

    def train(run: tuple[nn.Module, nn.Module, Any]) -> None:
        for _ in range(2):
            run[1](inputs).square().mean().backward()
            run[2].step()
            run[2].zero_grad()

    first = made()
    train(first)
    first[0][0].requires_grad_(True)
    try:
        train(first)
    except OwnershipError as error:
        return str(error), []
    saved = copy.deepcopy((first[0].state_dict(), first[2].state_dict()))
    train(first)
    again = made()
    again[0].load_state_dict(saved[0])
    again[2].load_state_dict(saved[1])
    again[0][0].requires_grad_(True)
    train(again)
    pairs = zip(first[0].parameters(), again[0].parameters(), strict=True)
    return "", [float((one - other).detach().abs().max()) for one, other in pairs]


@pytest.mark.filterwarnings("ignore:.*trains since the optimizer was built:UserWarning")
def test_torchs_wrapper_reduces_what_trained_when_it_was_made(launch):
    """Such a parameter may be frozen and unfrozen, and the run resumed to the bit; any other one is refused."""
    for error, differences in launch(unfrozen_under_torchs, 2, False):
        assert error == ""
        assert differences == [0.0] * 4
    for error, _ in launch(unfrozen_under_torchs, 2, True):
        assert (
            "DistributedDataParallel reduces only gradients of the parameters that trained when it was made"
            in error
        )
        assert "Build the optimizer with the parameter trainable and its learning rate 0" in error


def refused_by_a_fixed_layout(rank: int, size: int, sharding: str, folder: str) -> list[str]:
    """Unfreeze by a flag, by a group and by a load, where memory and layout are fixed; return the errors."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16))
    trained = copy.deepcopy(model)
    whole = build_optimizer(trained, "adam", lr=0.1)
    for param in trained.parameters():
        param.grad = torch.ones_like(param)
    whole.step()
    save_checkpoint(folder, trained, whole)
    model[0].requires_grad_(False)
    settings = {} if sharding == "fsdp" else {"sharding": sharding}
    if sharding == "fsdp":
        fully_shard(model, mesh=init_device_mesh("cpu", (size,)))
    optimizer = build_optimizer(model, "muon" if sharding == "layer_wise" else "adam", lr=0.1, **settings)
    words = []

    def unfreeze() -> None:
        model[0].requires_grad_(True)
        for param in model.parameters():
            param.grad = torch.ones_like(param)
        optimizer.step()

    def add() -> None:
        optimizer.add_param_group({"params": [*model[0].parameters()]})

    before = values_of(model)
    for attempt in (lambda: load_checkpoint(folder, model, optimizer), add, unfreeze):
        try:
            attempt()
        except MegaoptError as error:
            words.append(str(error))
    assert all(torch.equal(before[name], value) for name, value in values_of(model).items())
    return words


@pytest.mark.parametrize("sharding", ["distributed", "layer_wise", "fsdp"])
def test_fixed_layouts_say_how_to_build_for_what_trains_later(launch, tmp_path, sharding):
    """Every way to unfreeze is refused on all ranks, before anything moves."""
    for words in launch(refused_by_a_fixed_layout, 2, sharding, str(tmp_path / "saved")):
        assert len(words) == 3, words
        for error in words:
            assert "optimizer with the parameter trainable and its learning rate 0" in error, words
