"""Parametrizations: the factors of what is added to a weight are what the weight is."""

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

from megaopt_core.params import Doubt, Role
from megaopt_core.routing import infer_roles


class LowRank(nn.Module):
    """Adds a product of two factors."""

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        self.down, self.up = nn.Parameter(torch.randn(3, columns)), nn.Parameter(torch.zeros(rows, 3))
        self.function = self.add

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        """Return the weight with more."""
        return weight + (self.up @ self.down) * 2.0

    def add(self, weight: torch.Tensor) -> torch.Tensor:
        """Return the same, in the shape of the weight."""
        return weight + torch.matmul(self.up, self.drop(self.down)).view(weight.shape) * 2.0

    def drop(self, factor: torch.Tensor) -> torch.Tensor:
        """Return a factor as it is."""
        return factor


class ByAttribute(LowRank):
    """The same by a function that it holds."""

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        """Return the weight with more."""
        return self.function(weight)


class Masked(LowRank):
    """Multiplies the weight with a table, entry by entry, beside."""

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__(rows, columns)
        self.mask = nn.Parameter(torch.zeros(rows, columns))

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        """Return the weight with more, and less."""
        return super().forward(weight) * self.mask.sigmoid()


def model_with(make: Callable[[int, int], nn.Module], at: int) -> nn.Module:
    """Return a model with a parametrization of one of its weights."""
    model = nn.Sequential(nn.Embedding(20, 8), nn.Linear(8, 9), nn.ReLU(), nn.Linear(9, 5))
    parametrize.register_parametrization(model[at], "weight", make(*model[at].weight.shape))
    assert model(torch.tensor([[1, 2]])).shape == (1, 2, 5)
    return model


@pytest.mark.parametrize("make", [LowRank, ByAttribute, Masked], ids=lambda make: make.__name__)
def test_factors_of_what_is_added_to_a_matrix_are_matrices(make: type[LowRank]) -> None:
    """The sum is what the layer multiplies with."""
    found = infer_roles(model_with(make, 1))
    for name in ("down", "up", "original"):
        decision = found[f"1.parametrizations.weight.{'' if name == 'original' else '0.'}{name}"]
        assert (decision.role, decision.doubt) == (Role.MATRIX, Doubt.NONE), (name, decision)


def test_a_table_that_masks_a_matrix_is_none() -> None:
    """It is used entry by entry."""
    assert infer_roles(model_with(Masked, 1))["1.parametrizations.weight.0.mask"].role is Role.ELEMENTWISE


@pytest.mark.parametrize("at", [0, 3])
def test_factors_of_what_is_added_to_a_table_or_a_head_are_none(at: int) -> None:
    """They train with it."""
    found = infer_roles(model_with(LowRank, at))
    for name in ("down", "up"):
        decision = found[f"{at}.parametrizations.weight.0.{name}"]
        assert (decision.role, decision.doubt) == (Role.ELEMENTWISE, Doubt.NONE), (name, decision)
