"""A small network and its data, the same on every rank."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def make_model() -> nn.Module:
    """Return the same network on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 4))


def batch(rank: int) -> tuple[Tensor, Tensor]:
    """Return the inputs and targets of one rank."""
    inputs = torch.randn(8, 16, generator=torch.Generator().manual_seed(rank))
    return inputs, inputs[:, :4].cumsum(1)
