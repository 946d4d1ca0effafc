"""Last layers that return as many features as the model is given, of a class of somebody's own or of torch's."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from megaopt_core.params import Role
from megaopt_core.routing import infer_roles

GIVEN = 18


class Masked(nn.Linear):
    """Some of its entries are left out."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the product."""
        return functional.linear(x, self.weight * torch.ones_like(self.weight).tril(), self.bias)


class Standardized(nn.Linear):
    """Its entries are made as large as each other."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the product."""
        return x @ (self.weight / self.weight.std()).T


class Kernel(nn.Conv1d):
    """A convolution of one position."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the product."""
        return functional.conv1d(x.unsqueeze(-1), self.weight * 0.5, self.bias).squeeze(-1)


class Density(nn.Module):
    """Says how likely what it is given is, of what stands before it."""

    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.net = nn.Sequential(kind(GIVEN, 30), nn.ReLU(), kind(30, GIVEN))
        self.direct = kind(GIVEN, GIVEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return a loss."""
        scores = self.net(x) + self.direct(x)
        return functional.binary_cross_entropy_with_logits(scores, x, reduction="none").sum(-1).mean()


@pytest.mark.parametrize("kind", [nn.Linear, Masked, Standardized, Kernel])
def test_a_layer_that_uses_its_weight_by_hand_is_told_like_any_other(kind: type[nn.Module]) -> None:
    """What it makes is no width that others hand on, where it is the last."""
    model = Density(kind)
    assert model(torch.zeros(2, GIVEN)).shape == ()
    found = infer_roles(model)
    for name, role in (("net.0", Role.MATRIX), ("net.2", Role.OUTPUT), ("direct", Role.OUTPUT)):
        decision = found[f"{name}.weight"]
        assert (decision.role, decision.uncertain) == (role, False), (name, decision.reason)
