"""Products with a matrix that look like something else: none is certain to be element-wise."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch

from megaopt_core.params import Role
from megaopt_core.params._roles import Doubt
from megaopt_core.routing import infer_roles

HIDDEN = {  # products of `x`, of 6 features, with `self.w`, of shape [8, 6]
    "sum of products": "(x.unsqueeze(-2) * self.w).sum(-1)",
    "sum over an axis that an index made": "(x[..., None, :] * self.w).sum(dim=-1)",
    "mean of products": "(self.w * x[:, :, None]).mean(-1) * 6",
    "sum of transposed products": "(x.unsqueeze(-1) * self.w.T).sum(-2)",
    "sum behind an activation": "torch.tanh(x.unsqueeze(-2) * self.w).sum(-1)",
    "rows in another order": "F.linear(x, self.w.index_select(0, self.order))",
    "rows that an index orders": "F.linear(x, self.w[self.order])",
    "padded": "F.linear(x, F.pad(self.w, (0, 0, 0, 0)))",
    "drawn around it": "F.linear(x, torch.distributions.Normal(self.w, 0.1).rsample())",
    "drawn around it, with its own spread": "F.linear(x, torch.distributions.Normal(self.w, self.w.exp()).rsample())",
}
GAINS = {  # of vectors that scale features
    "a vector for each head": "(x.unflatten(-1, (2, 3)) * self.heads).sum(-1)",
    "a gain": "x * self.gain",
    "a gain, and a sum over positions": "(x * self.gain).sum(1)",
}


@pytest.mark.parametrize("case", HIDDEN)
def test_hidden_products(generated_models: ModuleType, case: str) -> None:
    """What is multiplied with a weight and summed was a product with it; so is a product with what it becomes."""
    made = (
        "self.a, self.head = nn.Linear(5, 6), nn.Linear(8, 7)\nself.w = nn.Parameter(torch.zeros(8, 6))\n"
        "self.register_buffer('order', torch.arange(8))"
    )
    forward = f"x = self.a(x).relu()\nreturn self.head(F.relu({HIDDEN[case]}))"
    with torch.device("meta"):
        found = infer_roles(generated_models.model_with_forward(made, "x", forward)())["w"]
    assert found.role is Role.MATRIX or found.doubt is Doubt.ROLE, found.reason


@pytest.mark.parametrize("case", GAINS)
def test_gains_stay_gains(generated_models: ModuleType, case: str) -> None:
    """A vector that scales features contracts none with another."""
    made = (
        "self.a, self.head = nn.Linear(5, 6), nn.Linear(6, 7)\n"
        "self.gain, self.heads = nn.Parameter(torch.zeros(4, 6)), nn.Parameter(torch.zeros(2, 3))"
    )
    forward = f"x = self.a(x).relu()\nreturn self.head({GAINS[case]})"
    with torch.device("meta"):
        found = infer_roles(generated_models.model_with_forward(made, "x", forward)())
    used = found["heads" if "head" in case else "gain"]
    assert (used.role, used.doubt) == (Role.ELEMENTWISE, Doubt.NONE), used.reason
