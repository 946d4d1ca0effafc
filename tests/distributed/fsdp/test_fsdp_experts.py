"""Experts that expert parallelism deals out and `fully_shard` cuts, beside dense matrices that lie over all ranks."""

import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from long_runs import sometimes
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from megaopt_core.optimizers import MegatronOptimizer
from megaopt_core.params import Box

sys.path.insert(0, str(Path(__file__).parent))

from fsdp_runs import OPTIMIZERS, alone, mesh_of, nothing_gathered, whole

pytest.importorskip("megaopt_fsdp")
pytest.importorskip("megaopt_muon")
from megaopt_checkpoint import load_checkpoint, save_checkpoint
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from megaopt_core import MatrixView, build_optimizer
from megaopt_core.errors import StateDictError

pytestmark = [pytest.mark.any_python, pytest.mark.distributed]
SHAPES = {
    "dense.weight": (13, 12),
    "dense.bias": (13,),
    "experts.up": (4, 12, 16),
    "experts.down": (4, 10, 12),
}


class Mixture(nn.Module):
    """Parameters alone: gradients are given."""

    def __init__(self) -> None:
        super().__init__()
        chance = torch.Generator().manual_seed(0)
        self.dense, self.experts = nn.Module(), nn.Module()
        for name, shape in SHAPES.items():
            module, _, attribute = name.rpartition(".")
            param = nn.Parameter(torch.randn(shape, generator=chance))
            self.get_submodule(module).register_parameter(attribute, param)


def viewed(model: Mixture) -> Mixture:
    """Say what the parameters are: `fully_shard` has made new ones."""
    model.dense.weight.matrix_view = MatrixView()
    for param in model.experts.parameters():
        param.matrix_view = MatrixView(batch_dims=1)
        param.allreduce = isinstance(param, DTensor)  # of DTensors the mesh says that they are experts'
    return model


def cut(mesh: DeviceMesh, dim: int) -> Mixture:
    """Deal experts out over `ep` and cut them over `dp`; cut what is dense over both."""
    model = Mixture()
    for name, param in list(model.experts.named_parameters()):
        setattr(model.experts, name, nn.Parameter(distribute_tensor(param.detach(), mesh["ep"], [Shard(0)])))
    fully_shard(model.experts, mesh=mesh["dp"], shard_placement_fn=lambda _: Shard(dim))
    fully_shard(model.dense, mesh=mesh["dp", "ep"]._flatten("dp_ep"))
    return viewed(model)


def give(model: Mixture, step: int, boxes: Mapping[str, Box] | None = None) -> None:
    """Give gradients; to a cut model the parts that it holds."""
    chance = torch.Generator().manual_seed(step)
    for name, param in model.named_parameters():
        grad = torch.randn(SHAPES[name], generator=chance)
        if boxes is not None:
            offsets, sizes = boxes[name]
            part = grad[
                tuple(slice(at, at + size) for at, size in zip(offsets, sizes, strict=True))
            ].contiguous()
            grad = DTensor.from_local(
                part, param.device_mesh, param.placements, shape=param.shape, stride=param.stride()
            )
        param.grad = grad


def stepped(kind: str, model: Mixture, mesh: DeviceMesh | None) -> MegatronOptimizer:
    """Step a cut model and a whole one for five steps, and compare."""
    name, settings = OPTIMIZERS[kind]
    settings = {"lr": 0.01, "weight_decay": 0.1, "clip_grad": 1.0} | settings
    reference = viewed(Mixture())
    theirs = build_optimizer(reference, name, pg_collection=alone(), **settings)
    ours = build_optimizer(model, name, pg_collection=mesh, **settings)
    boxes = {at: entry.box for at, entry in ours.routing.params.items()}
    for step in range(5):
        give(reference, step)
        give(model, step, boxes)
        with nothing_gathered():
            norm = ours.step().grad_norm
        assert norm == pytest.approx(theirs.step().grad_norm, rel=1e-6), kind
    for at, param in model.named_parameters():
        torch.testing.assert_close(whole(param), reference.get_parameter(at).detach(), rtol=0, atol=1e-6)
    return ours


def mixtures(rank: int, size: int, kinds: list[str]) -> None:
    """Step models that are cut along either dimension."""
    mesh = mesh_of(dp=2, ep=2)
    for kind in kinds:
        for dim in (0, 1):
            rows = {row.name: row for row in stepped(kind, cut(mesh, dim), mesh).report().params}
            assert (rows["experts.up"].bytes == 0) == (dim == 0 or kind == "adam"), "whole experts stay"


def cut_apart(tp: int, ep: int) -> Mixture:
    """Cut experts over a mesh of their own, and what is dense over another, as torchtitan does."""
    model, dense, sparse = Mixture(), mesh_of(fsdp=4 // tp, tp=tp), mesh_of(efsdp=4 // ep, ep=ep)
    for module, mesh, placement in (
        (model.experts, sparse["ep"], Shard(0)),
        (model.dense, dense["tp"], Shard(1)),
    ):
        for name, param in list(module.named_parameters()):
            where = placement if param.ndim > 1 else Replicate()
            setattr(module, name, nn.Parameter(distribute_tensor(param.detach(), mesh, [where])))
    fully_shard(model.experts, mesh=sparse["efsdp"])
    fully_shard(model.dense, mesh=dense["fsdp"])
    return viewed(model)


def apart(rank: int, size: int, kinds: list[str]) -> None:
    """Step models whose meshes alone say which ranks are which."""
    for kind in kinds:
        for tp, ep in ((1, 4), (2, 2), (2, 4)):
            ours = stepped(kind, cut_apart(tp, ep), None)
            is_expert = {at: entry.spec.is_expert for at, entry in ours.routing.params.items()}
            assert is_expert == {at: at.startswith("experts") for at in SHAPES}, (tp, ep)


def test_experts_over_both_axes_train_as_in_one_process(launch) -> None:
    """Whole experts on every rank, and experts of which each has a part."""
    kinds = [kind for kind in ("adam", "muon", "soap") if find_spec(f"megaopt_{kind}")]
    launch(mixtures, 4, kinds)


def test_experts_may_have_a_mesh_of_their_own(launch) -> None:
    """Of the ranks of data parallelism, of some of them, and of those of tensor parallelism too."""
    launch(apart, 4, [kind for kind in ("adam", "muon") if find_spec(f"megaopt_{kind}")])


def state_of(optimizer: MegatronOptimizer) -> dict[str, torch.Tensor]:
    """Return copies of what this rank keeps."""
    return {
        f"{name}/{key}": torch.as_tensor(value).clone()
        for param, name in optimizer.names.items()
        for key, value in optimizer.state[param].items()
        if torch.as_tensor(value).numel()
    }


def different(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> list[str]:
    """Return the names of what is not the same bit for bit."""
    return [name for name, value in first.items() if not torch.equal(value, second[name])]


def kept(rank: int, size: int, method: str, folder: str) -> None:
    """Save states that owners keep of some experts each, and load them into others."""
    mesh = mesh_of(dp=2, ep=2)
    settings = {"lr": 0.01, "clip_grad": 0.0, "adaptive_muon_moment2_method": method}
    for dim in (0, 1):
        model, other = cut(mesh, dim), cut(mesh, dim)
        ours, another = (
            build_optimizer(net, "adaptive_muon", pg_collection=mesh, **settings) for net in (model, other)
        )
        boxes = {at: entry.box for at, entry in ours.routing.params.items()}
        for step in range(2):
            give(model, step, boxes)
            ours.step()
        expected, path = state_of(ours), f"{folder}/{dim}"
        save_checkpoint(path, model, ours)
        load_checkpoint(path, other, another)
        assert different(expected, state_of(another)) == []
        options = StateDictOptions(full_state_dict=True)
        if method == "normuon":
            with pytest.raises(StateDictError, match="kept by several ranks that own some of its matrices"):
                get_optimizer_state_dict(model, ours, options=options)


@pytest.mark.parametrize("method", sometimes(["adamuon", "normuon"], ["normuon"]))
def test_states_of_experts_are_those_of_each_owner(launch, tmp_path, method) -> None:
    """A second moment that each owner has of its experts comes back to it; torch's state dicts cannot hold it."""
    launch(kept, 4, method, str(tmp_path))
