"""Gradients that another wrapper shards, or that nobody has reduced, are not stepped with."""

import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from launch import launch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from megaopt_core import build_optimizer
from megaopt_core.errors import MegaoptError, RankMismatchError

pytestmark = [pytest.mark.any_python, pytest.mark.distributed]


class Buffered(nn.Module):
    """A wrapper of somebody else's: one buffer, whose views are `main_grad`, reduced to all ranks or scattered."""

    def __init__(self, module: nn.Module, *, scatters: bool, tells: bool = True) -> None:
        super().__init__()
        self.module, self.scatters = module, scatters
        if tells:
            self.ddp_config = SimpleNamespace(use_distributed_optimizer=scatters)
        params = list(module.parameters())
        size = dist.get_world_size()
        numel = -(-sum(param.numel() for param in params) // size) * size
        self.buffer, start = torch.zeros(numel), 0
        for param in params:
            param.main_grad = self.buffer[start : start + param.numel()].view(param.shape)
            start += param.numel()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Call the module."""
        return self.module(x)

    def backward(self, loss: torch.Tensor) -> None:
        """Add to the buffer what a pass computes, and reduce it."""
        self.buffer.zero_()
        loss.backward()
        for param in self.module.parameters():
            param.main_grad.add_(param.grad)
            param.grad = None
        if self.scatters:
            chunks = list(self.buffer.chunk(dist.get_world_size()))
            for at, chunk in enumerate(chunks):
                total = chunk.clone()
                dist.all_reduce(total)
                if at == dist.get_rank():
                    chunk.copy_(total)
        else:
            dist.all_reduce(self.buffer)


def train(rank: int, size: int, setting: str, how: str) -> Any:
    """Build and step; return what is raised, in which of the two, and whether the model is as it was."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 4))
    wrapper = Buffered(model, scatters=how != "all-reduced", tells=how != "tells nothing")
    kept = [param.detach().clone() for param in model.parameters()]
    name, options = {
        "replicated": ("adam", {}),
        "distributed": ("adam", {"sharding": "distributed"}),
        "layer_wise": ("muon", {"sharding": "layer_wise"}),
        "muon": ("muon", {}),
    }[setting]
    place = "build"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            optimizer = build_optimizer(model if how == "bare" else wrapper, name, lr=0.1, **options)
        for step in range(2):
            place = f"step {step}"
            x = torch.randn(3, 6, generator=torch.Generator().manual_seed(10 * step + rank))
            wrapper.backward(wrapper(x).square().sum())
            optimizer.step()
    except MegaoptError as error:
        still = all(torch.equal(old, new) for old, new in zip(kept, model.parameters(), strict=True))
        return place, type(error).__name__, str(error), still
    return [param.detach().double().sum().item() for param in model.parameters()], optimizer.check()


SETTINGS = ["replicated", "distributed", "layer_wise", "muon"]


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_wrapper_that_shards_by_a_layout_of_its_own_is_refused(setting):
    """At the build, on all ranks, with the way out."""
    one, other = launch(train, 2, setting, "scattered")
    assert one == other
    place, kind, message, still = one
    assert (place, kind, still) == ("build", "ShardingError", True)
    assert "Buffered with use_distributed_optimizer=True, which gives each rank a share" in message
    assert "use_distributed_optimizer=False" in message


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("how", ["bare", "tells nothing"])
def test_gradients_of_an_unknown_reducer_are_compared_in_the_first_step(setting, how):
    """The model was unwrapped, or its wrapper says nothing: the first step raises on all ranks, and changes nothing."""
    ranks = launch(train, 4 if setting == "layer_wise" else 2, setting, how)
    assert all(answer == ranks[0] for answer in ranks)
    place, kind, message, still = ranks[0]
    assert (place, kind, still) == ("step 0", RankMismatchError.__name__, True)
    assert message.startswith("replicas have other gradients before the first step")
    assert "0.weight': norm " in message
    assert "Gradients look unreduced" in message


@pytest.mark.parametrize("setting", SETTINGS)
def test_whole_gradients_of_another_wrapper_are_stepped_with(setting):
    """They are the same on all ranks."""
    one, other = launch(train, 2, setting, "all-reduced")
    assert one == other
    assert one[1] == ()


def tensor_parallel(rank: int, size: int, marked: bool) -> Any:
    """Step half of a matrix on each rank; return the norm, or what is raised."""
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("tp",))
    weight = torch.randn(8, 6, generator=torch.Generator().manual_seed(0))
    model = nn.Linear(6, 4, bias=False)
    with torch.no_grad():
        model.weight.copy_(weight.chunk(size)[rank])
    if marked:
        model.weight.tensor_model_parallel, model.weight.partition_dim = True, 0
    model.weight.grad = weight.chunk(size)[rank].clone()
    try:
        return build_optimizer(model, "adam", lr=0.1, pg_collection=mesh).step().grad_norm
    except MegaoptError as error:
        return type(error).__name__, str(error)


def test_what_tensor_parallelism_cuts_must_be_marked():
    """Without a mark each rank's half is taken for a copy, and the norm would be one rank's."""
    weight = torch.randn(8, 6, generator=torch.Generator().manual_seed(0))
    assert launch(tensor_parallel, 2, True) == [pytest.approx(weight.norm().item())] * 2
    one, other = launch(tensor_parallel, 2, False)
    assert one == other
    assert one[0] == RankMismatchError.__name__
    assert "parameter 'weight': norm " in one[1]
    assert "param.tensor_model_parallel = True, param.partition_dim = " in one[1]
