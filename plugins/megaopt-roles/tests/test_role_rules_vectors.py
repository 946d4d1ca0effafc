"""Bare vectors in a product: a head of one score, or no head at all."""

from types import ModuleType

import pytest
import torch

from megaopt_core.params import Doubt, Role
from megaopt_core.routing import infer_roles

MADE = (
    "self.first, self.one = nn.Linear(9, 12), nn.Linear(12, 1)\n"
    "self.row, self.column = nn.Parameter(torch.zeros(1, 12)), nn.Parameter(torch.zeros(12, 1))\n"
    "self.points, self.mean = nn.Parameter(torch.randn(7, 12)), nn.Parameter(torch.zeros(7, 1))\n"
)
BEGIN = "h = self.first(x).relu()\n"
SCORES = {  # the vector, and what is returned
    "a row": ("row", "return F.linear(h, self.row)"),
    "a row that is turned": ("row", "return (h @ self.row.T).squeeze(-1)"),
    "a column": ("column", "return torch.sigmoid(h @ self.column)"),
    "a column in a loss": ("column", "return F.mse_loss((h @ self.column).squeeze(-1), y)"),
    "an einsum": ("column", "return torch.einsum('bd,do->bo', h, self.column)"),
    "with a penalty": (
        "column",
        "return F.mse_loss((h @ self.column)[:, 0], y) + self.column.square().sum()",
    ),
}
NONE = {  # of vectors that are no heads
    "multiplied with a score": ("row", "return h + self.one(h).tanh() * self.row"),
    "a product with a score": ("row", "return h + self.one(h).tanh() @ self.row"),
    "an outer product": ("row", "return h + torch.einsum('bo,od->bd', self.one(h), self.row)"),
    "a flow": (
        "row",
        "a = h @ self.column\ns = (1 - a.tanh() ** 2) * self.column.T\n"
        "return h + self.row * a.tanh(), (1 + s @ self.row.T).abs().log()",
    ),
    "distances": ("mean", "return torch.exp(-torch.cdist(h, self.points)) @ self.mean"),
    "a kernel": (
        "mean",
        "k = torch.exp(-0.5 * torch.cdist(self.points / 2, h / 2).square())\nreturn (k.T @ self.mean).squeeze(-1)",
    ),
}


@pytest.mark.parametrize("case", [*SCORES, *NONE])
def test_vectors(generated_models: ModuleType, case: str) -> None:
    """One that leaves a score of features is a head, and any other one element-wise; both for certain."""
    name, rest = (SCORES | NONE)[case]
    model = generated_models.model_with_forward(MADE, "x, y", BEGIN + rest)()
    model(torch.randn(4, 9), torch.zeros(4))
    found = infer_roles(model)[name]
    role = Role.OUTPUT if case in SCORES else Role.ELEMENTWISE
    assert (found.role, found.doubt) == (role, Doubt.NONE), found.reason
