"""A model that no number of ranks divides, and training it with given gradients."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from megaopt_core import MatrixView, ShardingStrategy, build_optimizer, get_registry
from megaopt_core.optimizers import MegatronOptimizer

__all__ = ["Uneven", "built", "takes_cut", "train", "values_of"]

_WITHOUT_GRADIENT = "never"
_SOMETIMES = "few"


class Uneven(nn.Module):
    """Matrices whose rows no number of ranks divides, fewer rows than ranks, a vector, a number, a frozen weight.

    Args:
        seed: for the weights.
    """

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        chance = torch.Generator().manual_seed(seed)

        def weight(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(shape, generator=chance))

        self.tall, self.wide, self.few = weight(13, 8), weight(8, 24), weight(3, 8)
        self.square, self.never = weight(16, 16), weight(5, 8)
        self.bias, self.scale = weight(11), weight()
        self.frozen = nn.Parameter(torch.randn(4, 4, generator=chance), requires_grad=False)
        self.say_what_is_what()

    def say_what_is_what(self) -> None:
        """Mark the matrices as hidden ones, since nothing calls them; cutting makes other parameters of them."""
        for matrix in (self.tall, self.wide, self.few, self.square, self.never):
            matrix.matrix_view = MatrixView()  # type: ignore[attr-defined] # nothing shows what it is

    def cut(self) -> None:
        """Cut it by FSDP2 over all ranks, but for the parameter without a dimension, which every rank has."""
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        fully_shard(self, mesh=mesh, ignored_params={self.scale})
        self.say_what_is_what()


def train(model: Uneven, optimizer: MegatronOptimizer, steps: Iterable[int]) -> list[Any]:
    """Take steps with gradients that depend on their number alone; one gets none, one every other time.

    Args:
        model: the model.
        optimizer: its optimizer.
        steps: their numbers.

    Returns:
        The gradient norm of each step.
    """
    norms = []
    for step in steps:
        chance = torch.Generator().manual_seed(step)
        for name, param in model.named_parameters():
            grad = torch.randn(param.shape, generator=chance).to(param.dtype)
            left_out = name == _WITHOUT_GRADIENT or (name == _SOMETIMES and step % 2)
            param.grad = None if left_out or not param.requires_grad else _cut_as(param, grad)
        norms.append(optimizer.step().grad_norm)
    return norms


def _cut_as(param: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    if not isinstance(param, DTensor):
        return grad
    return distribute_tensor(grad, param.device_mesh, param.placements)


def values_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return copies of all parameters by name.

    Args:
        model: the model.
    """
    return {
        name: param.full_tensor().detach() if isinstance(param, DTensor) else param.detach().clone()
        for name, param in model.named_parameters()
    }


def built(name: str, settings: Mapping[str, Any], seed: int = 0) -> tuple[Uneven, MegatronOptimizer]:
    """Return a model and its optimizer, with one random state whatever the rank; cut by FSDP2 where that is stepped.

    Args:
        name: the optimizer's registered name.
        settings: fields of the configuration.
        seed: for the weights.
    """
    torch.manual_seed(0)
    model = Uneven(seed).to(torch.bfloat16 if settings.get("bf16") else torch.float32)
    if takes_cut(settings["sharding"]) and dist.is_initialized():
        model.cut()
    return model, build_optimizer(model, name, **settings)


def takes_cut(sharding: str) -> bool:
    """Return whether a strategy steps what FSDP2 has cut, and nothing else.

    Args:
        sharding: its registered name.
    """
    strategy = get_registry().strategy(sharding)
    return type(strategy).claims is not ShardingStrategy.claims
