"""Frameworks that build the optimizer, shard the model, and switch the parameters in the optimizer's groups."""

import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

sys.path.insert(0, str(Path(__file__).parent))

from fsdp_runs import OPTIMIZERS, ThirdParty, alone, build, mesh_of, require_close, train, whole_model

pytest.importorskip("megaopt_fsdp")
pytest.importorskip("megaopt_muon")
from megaopt_fsdp import build_before_sharding
from megaopt_testing import temporary_plugin
from torch.distributed.fsdp import fully_shard

from megaopt_core import ChainedOptimizer, MegatronOptimizer
from megaopt_core.errors import UnsupportedOperationError

pytestmark = [pytest.mark.any_python, pytest.mark.distributed]
KINDS = ("adam", "muon", "newcomer")


def built(model: nn.Module, kind: str) -> torch.optim.Optimizer:
    """Return the optimizer of a model that is whole."""
    name, settings = OPTIMIZERS[kind]
    return build_before_sharding(
        model, name, **({"lr": 0.004, "weight_decay": 0.1, "clip_grad": 0.5} | settings)
    )


def shard_and_switch(model: nn.Module, optimizer: torch.optim.Optimizer, mesh: DeviceMesh) -> None:
    """Do as accelerate does: let go of the parameters, cut the model, and put the new ones in their places."""
    names = {param: name for name, param in model.named_parameters()}
    places = []
    for group in optimizer.param_groups:
        for index, param in enumerate(group["params"]):
            group["params"][index] = torch.empty(1)
            places.append((group["params"][index], names[param]))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    name_of = {id(place): name for place, name in places}
    for group in optimizer.param_groups:
        group["params"] = [model.get_parameter(name_of[id(place)]) for place in group["params"]]


def switched(rank: int, size: int) -> None:
    """Train as one process does, with a scheduler and a hook that were there before and after."""
    mesh = mesh_of(dp=size)
    with temporary_plugin(ThirdParty(), name="third-party"):
        for kind in KINDS:
            reference, model = whole_model(), whole_model()
            theirs, ours = build(reference, kind, alone()), built(model, kind)
            steps = []
            ours.register_step_post_hook(lambda *_, steps=steps: steps.append(1))
            for optimizer in (theirs, ours):
                for group in optimizer.param_groups:
                    group["weight_decay"] = 0.2
            shard_and_switch(model, ours, mesh)
            schedules = [
                torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
                for optimizer in (theirs, ours)
            ]
            for step in range(3):
                expected = train(reference, theirs, [step], replicas=size)
                assert train(model, ours, [step], mesh) == pytest.approx(expected, rel=1e-6)
                for schedule in schedules:
                    schedule.step()
            require_close(model, reference)
            assert type(ours) in (MegatronOptimizer, ChainedOptimizer)
            assert {row.strategy for row in ours.report().params} == {"fsdp"}
            assert len(steps) == 3
            assert ours.state_dict()["param_groups"][0]["weight_decay"] == 0.2


def test_an_optimizer_follows_its_model_when_it_is_sharded(launch) -> None:
    """Element-wise, split and whole steps, with schedulers, hooks and changed settings."""
    launch(switched, 2)


def test_without_sharding_it_is_the_optimizer_that_it_was_built_as() -> None:
    """Same bits as `build_optimizer`."""
    runs = []
    for make in (built, lambda model, kind: build(model, kind, alone())):
        model = whole_model()
        optimizer = make(model, "muon")
        train(model, optimizer, range(2))
        runs.append({name: param.detach().clone() for name, param in model.named_parameters()})
    assert all(torch.equal(value, runs[1][name]) for name, value in runs[0].items())


def switched_without_following(rank: int, size: int) -> str:
    """Return the error of a step whose groups were given DTensors, as accelerate does it."""
    model = whole_model()
    optimizer = build(model, "adam", alone())
    shard_and_switch(model, optimizer, mesh_of(dp=size))
    with pytest.raises(UnsupportedOperationError) as caught:
        optimizer.step()
    return str(caught.value)


def test_the_error_names_the_door_for_models_that_are_sharded_later(launch) -> None:
    """Built by `build_optimizer`, it cannot follow."""
    (said,) = set(launch(switched_without_following, 2))
    assert said.startswith("the parameters of a group of ")
    assert "became DTensors: the model was sharded after its optimizer was built" in said
    assert "megaopt_fsdp.build_before_sharding(model, ...)" in said
