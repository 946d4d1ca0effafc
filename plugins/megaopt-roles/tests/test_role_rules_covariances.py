"""Roots of covariances: triangles of which squares are made, and triangles that mix positions or make a flow."""

from types import ModuleType

import pytest
import torch

from megaopt_core.params import Doubt, Role
from megaopt_core.routing import infer_roles

MADE = (
    "self.a, self.h = nn.Linear(6, 8), nn.Linear(8, 3)\nself.q = nn.Parameter(torch.eye(8).repeat(3, 1, 1))"
)
ONE = "self.a, self.h = nn.Linear(6, 8), nn.Linear(8, 3)\nself.q = nn.Parameter(torch.eye(8))"
ROOTS = {  # the variance
    "einsum": (MADE, "torch.einsum('nm,omk->nok', x, self.q.tril()).pow(2).sum(-1)"),
    "upper": (MADE, "((x @ torch.triu(self.q)) ** 2).sum(-1).t()"),
    "squares": (MADE, "(x @ self.q.tril().mT).square().sum(-1).t()"),
    "with a diagonal": (MADE, "(x @ (self.q.tril(-1) + torch.eye(8))).pow(2).sum(-1).t()"),
    "one": (ONE, "(x @ self.q.tril()).pow(2).sum(-1, keepdim=True)"),
    "a covariance": (ONE, "((x @ (self.q.tril() @ self.q.tril().T)) * x).sum(-1, keepdim=True)"),
}
MIXING = {  # no square is made of it
    "positions": (ONE, "self.h((self.q.tril() @ x))"),
    "features": (ONE, "self.h(F.gelu(F.linear(x, self.q.triu())))"),
}


def decided(models: ModuleType, made: str, text: str) -> tuple[Role, Doubt, str]:
    """Return the decision for the weight, and its reason."""
    body = f"def forward(self, x):\n    x = self.a(x).relu()\n    return self.h(x) + {text}"
    model = models.model(made, body)()
    model(torch.randn(8, 6))
    found = infer_roles(model)["q"]
    return found.role, found.doubt, found.reason


@pytest.mark.parametrize("case", ROOTS)
def test_the_root_of_a_covariance_is_in_doubt(generated_models: ModuleType, case: str) -> None:
    """It is treated as element-wise, in doubt."""
    role, doubt, reason = decided(generated_models, *ROOTS[case])
    assert (role, doubt) == (Role.ELEMENTWISE, Doubt.ROLE), reason


@pytest.mark.parametrize("case", MIXING)
def test_a_triangle_that_mixes_is_a_matrix(generated_models: ModuleType, case: str) -> None:
    """A triangle of which no square is made stays a matrix for certain."""
    role, doubt, reason = decided(generated_models, *MIXING[case])
    assert (role, doubt) == (Role.MATRIX, Doubt.NONE), reason
