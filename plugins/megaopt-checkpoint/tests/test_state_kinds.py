"""States of every kind: nested, of other shapes, scattered in memory; models of every kind."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from megaopt_checkpoint import load_checkpoint, save_checkpoint
from megaopt_checkpoint.collected import collect_state
from megaopt_checkpoint.manifest import read_manifest
from megaopt_testing import temporary_plugin
from random_cuts import random_cuts
from torch.optim.optimizer import ParamsT
from training import make, train, values

from megaopt_core import OptimizerEntry, build_optimizer, hookimpl
from megaopt_core.errors import CheckpointError

pytestmark = pytest.mark.any_python


class Factors(torch.optim.Optimizer):
    """Keeps factors in a list, a name, and numbers of three kinds."""

    def __init__(self, params: ParamsT, lr: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr, "phase": 0.0})

    def step(self, closure: Callable[[], float] | None = None) -> None:
        for group in self.param_groups:
            group["phase"] += 0.5
            for param in group["params"]:
                state = self.state[param]
                if not state:
                    state.update(
                        count=0, kind="new", scale=torch.ones(()), factors=[], moment=torch.zeros_like(param)
                    )
                    state["factors"] = [torch.zeros(size, size) for size in param.shape]
                state["count"] += 1
                state["kind"] = "used"
                state["scale"].mul_(0.5)
                state["moment"].add_(param.grad)
                for dim, factor in enumerate(state["factors"]):
                    rows = param.grad.movedim(dim, 0).reshape(factor.shape[0], -1)
                    factor.add_(rows @ rows.T)
                param.sub_(group["lr"] * state["scale"] * state["moment"] / (1 + state["factors"][0].norm()))


class FactorsPlugin:
    megaopt_api = "1"

    def __init__(self, granularity: str) -> None:
        self.granularity = granularity

    @hookimpl
    def megaopt_optimizer_entries(self) -> dict[str, OptimizerEntry]:
        return {"factors": OptimizerEntry(Factors, granularity=self.granularity)}


def test_nested_state_and_settings_that_the_optimizer_counts(tmp_path):
    """Lists of factors, strings, Python numbers; a group setting that moves with every step."""
    with temporary_plugin(FactorsPlugin("tensor")):
        model, optimizer = make(optimizer="factors")
        train(model, optimizer, range(3))
        save_checkpoint(tmp_path / "last", model, optimizer)
        state = next(iter(optimizer.state.values()))
        expected = state["count"], state["kind"], float(state["scale"])
        train(model, optimizer, range(3, 5))
        other_model, other = make(seed=1, optimizer="factors")
        load_checkpoint(tmp_path / "last", other_model, other)
        assert {group["phase"] for group in other.param_groups} == {1.5}
        state = next(iter(other.state.values()))
        assert (state["count"], state["kind"], float(state["scale"])) == expected
        train(other_model, other, range(3, 5))
    assert all(
        torch.equal(a, b) for a, b in zip(values(model).values(), values(other_model).values(), strict=True)
    )


def test_state_that_cannot_be_cut_is_named(tmp_path):
    """Before anything is written."""
    with temporary_plugin(FactorsPlugin("element")), random_cuts(1, ranks=2, rank=0):
        model, optimizer = make(optimizer="factors", sharding="cut1")
        with pytest.raises(
            CheckpointError, match=r"state 'factors' of .* steps only a part of the parameter"
        ):
            save_checkpoint(tmp_path / "last", model, optimizer)


class Scattered(torch.nn.Module):
    """Channels-last weights, buffers, a lazy count, extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = torch.nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last)
        self.norm = torch.nn.BatchNorm2d(4)
        self.register_buffer("scratch", torch.randn(2), persistent=False)
        self.notes = {}

    def get_extra_state(self) -> dict[str, Any]:
        return self.notes

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.notes = state


def test_scattered_memory_buffers_and_extra_state(tmp_path):
    """Whatever the strides, elements are in the order of the logical tensor."""
    model = Scattered()
    model.notes = {"epoch": 3}
    optimizer = build_optimizer(model, "adam", lr=1e-2)
    for param in model.parameters():
        param.grad = torch.randn_like(param)
    optimizer.step()
    model.norm.running_mean.normal_()
    save_checkpoint(tmp_path / "last", torch.nn.DataParallel(model), optimizer)
    assert "model.conv.weight" in read_manifest(tmp_path / "last").tensors
    assert "model.scratch" not in read_manifest(tmp_path / "last").tensors
    other = Scattered()
    other_optimizer = build_optimizer(other, "adam", lr=1e-2)
    load_checkpoint(tmp_path / "last", other, other_optimizer)
    assert other.notes == {"epoch": 3}
    for name, value in model.state_dict().items():
        assert name.endswith("_extra_state") or torch.equal(value, other.state_dict()[name])
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        for key, value in optimizer.state[mine].items():
            assert torch.equal(value, other_optimizer.state[theirs][key])


def test_chunks_that_number_alike_are_told_apart(tmp_path):
    """A buffer of each chunk under a name of its own with `fqn=`; without it an error, not a silent loss."""
    chunks = [torch.nn.BatchNorm1d(2), torch.nn.BatchNorm1d(2)]

    def fqn(index, name):
        return f"stage{index}.{name}"

    optimizer = build_optimizer(chunks, "adam", lr=1e-2, fqn=fqn)
    chunks[1].running_mean.fill_(5.0)
    with pytest.raises(CheckpointError, match=r"two chunks of the model have a tensor 'running_mean'.*fqn="):
        save_checkpoint(tmp_path / "last", chunks, optimizer)
    save_checkpoint(tmp_path / "last", chunks, optimizer, fqn=fqn)
    others = [torch.nn.BatchNorm1d(2), torch.nn.BatchNorm1d(2)]
    load_checkpoint(tmp_path / "last", others, build_optimizer(others, "adam", lr=1e-2, fqn=fqn), fqn=fqn)
    assert [float(chunk.running_mean[0]) for chunk in others] == [0.0, 5.0]


def test_a_wrapped_torch_optimizer(tmp_path):
    """`FP32Optimizer` has no routing; its names and states are saved all the same."""
    from megaopt_core import FP32Optimizer, OptimizerConfig

    def wrapped():
        model = torch.nn.Linear(3, 2)
        plain = torch.optim.RMSprop(model.named_parameters(), lr=1e-2, momentum=0.9)
        return model, FP32Optimizer(plain, OptimizerConfig(lr=1e-2, clip_grad=0.0))

    model, optimizer = wrapped()
    train(model, optimizer, range(3))
    save_checkpoint(tmp_path / "last", model, optimizer)
    train(model, optimizer, range(3, 5))
    other_model, other = wrapped()
    assert load_checkpoint(tmp_path / "last", other_model, other).loaded == ("bias", "weight")
    train(other_model, other, range(3, 5))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other_model.parameters(), strict=True))


def test_nothing_can_be_computed_with_a_slice():
    """A slice says what it is, and refuses the rest."""
    from megaopt_core.errors import UnsupportedOperationError

    model, optimizer = make()
    train(model, optimizer, range(1))
    tensor = collect_state(optimizer).tensors["optim.state.norm.weight.exp_avg"]
    assert repr(tensor) == "SlicedTensor([8], torch.float32, boxes: [0]+[8])"
    with pytest.raises(UnsupportedOperationError, match="not possible on a slice"):
        tensor + 1


def test_a_group_map_is_written_when_an_optimizer_is_built(tmp_path):
    """`dump_param_to_param_group_map` of `get_megatron_optimizer`."""
    import torch.distributed.checkpoint as dcp

    from megaopt_core import OptimizerConfig, get_megatron_optimizer

    model = torch.nn.Linear(2, 2)
    config = OptimizerConfig(optimizer="adam", lr=1e-3)
    get_megatron_optimizer(config, [model], dump_param_to_param_group_map=str(tmp_path / "map"))
    groups = {"weight": torch.tensor(-1), "bias": torch.tensor(-1)}
    with pytest.warns(UserWarning, match="single process"):
        dcp.load(groups, checkpoint_id=tmp_path / "map", no_dist=True)
    assert {name: int(group) for name, group in groups.items()} == {"weight": 0, "bias": 1}
