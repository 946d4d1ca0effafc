"""Weights that are cut to the length of the input: matrices where both sides of a product are, tables elsewhere."""

import pytest
import torch
from torch import nn

from megaopt_core.params import Role
from megaopt_core.routing import infer_roles


class Mixed(nn.Module):
    """Mixes positions by a square as large as the input is long."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(6, 6), nn.Linear(6, 3)
        self.mixing = nn.Parameter(torch.randn(heads, 8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return scores."""
        x, n = self.inner(x), x.shape[1]
        return self.head(torch.einsum("bnd,hmn->bmd", x, self.mixing[:, :n, :n]).relu())


class Compared(Mixed):
    """Compares what it is given with a code for each place in a picture."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return scores."""
        x, n = self.inner(x), x.shape[1]
        return torch.einsum("bnd,mnd->bmn", x, self.mixing[:n, :n, :6])


@pytest.mark.parametrize("heads", [1, 3])
def test_a_square_of_positions_that_a_product_contracts_is_a_matrix(heads: int) -> None:
    """It is cut on both sides of the product."""
    model = Mixed(heads)
    assert model(torch.randn(2, 5, 6)).shape == (2, 5, 3)
    assert infer_roles(model)["mixing"].role is Role.MATRIX


def test_a_table_of_places_is_no_matrix_by_that() -> None:
    """The product sums over neither of the sides that are cut."""
    decision = infer_roles(Compared(8))["mixing"]
    assert decision.uncertain or decision.role is not Role.MATRIX
