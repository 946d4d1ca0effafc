"""A weight that a number scales, which may be given, is what it is without that."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from megaopt_core.params import Doubt, Role
from megaopt_core.routing import infer_roles


class Scaled(nn.Module):
    """A layer of somebody's own whose weight is scaled on request."""

    def __init__(self, takes: int, returns: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(returns, takes))

    def forward(self, x: torch.Tensor, gain: float = 1.0) -> torch.Tensor:
        return functional.linear(x, self.weight * (gain / self.weight[0].numel() ** 0.5))


class OnlyByName(Scaled):
    """The same, named."""

    def forward(self, x: torch.Tensor, *, gain: float = 1.0) -> torch.Tensor:
        return x @ (self.weight / self.weight.norm() * gain).t()


class Net(nn.Module):
    """With a learned scale of one layer."""

    def __init__(self, cls: type[Scaled]) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.zeros([]))
        self.one, self.two, self.head = cls(6, 8), cls(8, 9), nn.Linear(9, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.relu(self.two(torch.relu(self.one(x)), gain=self.gain)))


@pytest.mark.parametrize("cls", [Scaled, OnlyByName])
def test_a_scale_that_may_be_given(cls: type[Scaled]) -> None:
    """It is no use element by element."""
    with torch.device("meta"):
        found = infer_roles(Net(cls))
    for name in ("one.weight", "two.weight"):
        assert (found[name].role, found[name].doubt) == (Role.MATRIX, Doubt.NONE), found[name].reason
