"""Small models with awkward sizes, and ways to train them."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from megaopt_core.optimizers import MegatronOptimizer

PRIMES = (13, 29, 7)


class Awkward(nn.Module):
    """Prime sizes, a scalar, a frozen layer and a tied head."""

    def __init__(self, *, tied: bool = True) -> None:
        super().__init__()
        self.embedding = nn.Embedding(31, 13)
        self.up = nn.Linear(13, 29)
        self.norm = nn.LayerNorm(29)
        self.gain = nn.Parameter(torch.ones(1))
        self.frozen = nn.Linear(29, 29)
        self.frozen.requires_grad_(requires_grad=False)
        self.down = nn.Linear(29, 13, bias=False)
        self.head = nn.Linear(13, 31, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the logits of every token."""
        hidden = self.embedding(tokens)
        inner = self.frozen(self.norm(torch.relu(self.up(hidden)))) * self.gain
        return self.head(hidden + self.down(inner))


def awkward(*, seed: int = 0, tied: bool = True, dtype: torch.dtype = torch.float32) -> Awkward:
    """Return the same model on every rank."""
    torch.manual_seed(seed)
    return Awkward(tied=tied).to(dtype)


def batch(step: int, rank: int, count: int = 8) -> torch.Tensor:
    """Return tokens that are different in every step and on every rank."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randint(0, 31, (4, count), generator=generator)


def loss_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """Return a loss in which every trainable parameter takes part."""
    return nn.functional.cross_entropy(model(tokens).float().flatten(0, 1), tokens.flatten())


def values_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return copies of all parameters by canonical name."""
    return {name.removeprefix("module."): param.detach().clone() for name, param in model.named_parameters()}


def states_of(optimizer: MegatronOptimizer) -> dict[str, torch.Tensor]:
    """Return every optimizer state and main parameter whole and flat, put together from what all ranks hold."""
    held = [None] * dist.get_world_size()
    dist.all_gather_object(held, list(_held_by(optimizer)))
    parts: dict[str, dict[tuple, torch.Tensor]] = {}
    shapes = {}
    for name, shape, box, start, values in (entry for entries in held for entry in entries):
        shapes[name] = shape
        parts.setdefault(name, {})[box, start] = values
    return {name: _joined(shapes[name], parts[name]) for name in parts}


def _joined(shape: tuple[int, ...], parts: Mapping[Any, torch.Tensor]) -> torch.Tensor:
    """Return a state flat: runs of the whole one after the other, boxes each in its place."""
    if len({box for box, _ in parts}) == 1:
        return torch.cat([parts[key] for key in sorted(parts)])
    whole = torch.full(shape, torch.nan)
    for ((offsets, sizes), _), values in parts.items():
        view = whole
        for dim, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
            view = view.narrow(dim, offset, size)
        view.copy_(values.view(sizes))
    return whole.flatten()


def _held_by(optimizer: MegatronOptimizer) -> Iterator[Any]:
    for part in optimizer.parts:
        for index, (piece, tensor) in enumerate(zip(part.pieces, part.stepped, strict=True)):
            state = part.inner.state[tensor]
            values = {key: part.precision.read_state(index, key, state) for key in state}
            values.update(part.precision.extra_state(index))
            for key, value in values.items():
                for offset, shard in piece.spec.members:
                    name, flat = f"{shard.name}/{key}", value.flatten().clone()
                    is_whole = flat.numel() == piece.param.numel()
                    box, values = (shard.box, flat[offset:][: shard.numel]) if is_whole else (None, flat)
                    yield name, shard.shape, box, shard.start if is_whole else 0, values
