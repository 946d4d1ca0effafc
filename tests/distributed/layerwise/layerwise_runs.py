"""Models whose matrices have owners, and runs that several processes make of them."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from megaopt_distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    plan_full_param_layout,
)
from models import batch, loss_of, states_of, values_of
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from megaopt_core import OptimizerConfig, build_optimizer, get_megatron_optimizer, route
from megaopt_core.optimizers import MegatronOptimizer

STEPS = 4
PLAIN = {"clip_grad": 0.0, "weight_decay": 0.1, "lr": 1e-2}


class Blocks(nn.Module):
    """Matrices of several shapes, a tied head, norms and biases; one block may be frozen."""

    def __init__(self, blocks: int, *, tied: bool, frozen: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(31, 24)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(24), nn.Linear(24, 56), nn.Tanh(), nn.Linear(56, 24))
            for _ in range(blocks)
        )
        self.last = nn.Linear(24, 24, bias=False)
        self.head = nn.Linear(24, 31, bias=False)
        if tied:
            self.head.weight = self.embedding.weight
        if frozen:
            self.blocks[0].requires_grad_(requires_grad=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the logits of every token."""
        hidden = self.embedding(tokens)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return self.head(self.last(hidden))


def blocks(
    *,
    count: int = 3,
    tied: bool = False,
    frozen: bool = False,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> nn.Module:
    """Return the same model on every rank."""
    torch.manual_seed(seed)
    return Blocks(count, tied=tied, frozen=frozen).to(dtype)


def wrapped(
    model: nn.Module, wrapper: str, config: OptimizerConfig, ddp: Mapping[str, Any] | None = None
) -> nn.Module:
    """Wrap a model: in torch's DDP, in ours with whole gradients, or in buffers that its routing plans."""
    if wrapper == "torch":
        return TorchDDP(model)
    ddp_config = DistributedDataParallelConfig(
        **{"use_distributed_optimizer": wrapper == "buffers", **(ddp or {})}
    )
    if wrapper == "whole gradients":
        return DistributedDataParallel(model, ddp_config)
    layout = plan_full_param_layout(model, ddp_config, routing=route(config, [model]))
    return DistributedDataParallel(model, ddp_config, full_param_layout=layout)


def train(
    rank: int,
    size: int,
    optimizer: str,
    sharding: str,
    wrapper: str = "torch",
    *,
    model: Mapping[str, Any] | None = None,
    settings: Mapping[str, Any] | None = None,
    ddp: Mapping[str, Any] | None = None,
    micro: int = 1,
) -> tuple[dict[str, torch.Tensor], tuple[Any, ...]]:
    """Train on batches of each rank's own, and return every parameter and state, whole, and what the last step said."""
    module = blocks(**(model or {}))
    given = {**PLAIN, **(settings or {})}
    config = OptimizerConfig(optimizer=optimizer, sharding=sharding, **given)
    outer = wrapped(module, wrapper, config, ddp)
    stepper = get_megatron_optimizer(config, [outer])
    for step in range(STEPS):
        for part in range(micro - 1):
            with outer.no_sync():
                loss_of(outer, batch(100 * (part + 1) + step, rank)).backward()
        loss_of(outer, batch(step, rank)).backward()
        result = stepper.step()
        stepper.zero_grad()
    for chunk in [outer]:
        if hasattr(chunk, "finish_param_sync"):
            chunk.finish_param_sync()
    return values_of(module) | states_of(stepper), tuple(result)


def several(rank: int, size: int, runs: Mapping[str, tuple[Any, Any]]) -> dict[str, Any]:
    """Do several runs one after the other in the same processes."""
    return {name: train(rank, size, *arguments, **options) for name, (arguments, options) in runs.items()}


def given_gradients(
    rank: int,
    size: int,
    optimizer: str,
    sharding: str,
    *,
    model: Mapping[str, Any] | None = None,
    settings: Mapping[str, Any] | None = None,
    missing: Iterable[str] = (),
) -> dict[str, torch.Tensor]:
    """Step on gradients that all ranks have alike; some matrices have none in the first step."""
    module = blocks(**(model or {}))
    stepper = build_optimizer(module, optimizer, sharding=sharding, **{**PLAIN, **(settings or {})})
    generator = torch.Generator().manual_seed(3)
    for step in range(STEPS):
        for name, param in module.named_parameters():
            grad = torch.randn(param.shape, generator=generator).to(param.dtype)
            param.grad = None if step == 0 and name in missing else grad
        stepper.step()
    return values_of(module)


def differing(expected: Mapping[str, torch.Tensor], found: Mapping[str, torch.Tensor]) -> list[str]:
    """Return the names of what differs in a bit or is missing."""
    return [
        name
        for name, value in expected.items()
        if name not in found or not torch.equal(value.flatten(), found[name].flatten())
    ]


def owned(optimizer: MegatronOptimizer) -> list[str]:
    """Return the names of the matrices that this rank steps whole."""
    return [
        shard.name
        for part in optimizer.parts
        for piece in part.pieces
        if piece.spec.buffer is None or piece.spec.buffer[0].is_managed_by_layer_wise
        for _, shard in piece.spec.members
    ]
