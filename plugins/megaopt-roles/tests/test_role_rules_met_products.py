"""Queries and keys that bare matrices make of activations, under softmaxes over either of the two."""

from types import ModuleType

import pytest

from megaopt_core.params import Doubt, Role
from megaopt_core.routing import infer_roles

MADE = (
    "self.q, self.k = nn.Parameter(torch.randn(16, 16)), nn.Parameter(torch.randn(16, 16))\n"
    "self.slots = nn.Parameter(torch.randn(1, 4, 16))\n"
    "self.first, self.out = nn.Linear(9, 16), nn.Linear(16, 5)"
)
WEIGHED = {  # of scores [batch, positions, slots]
    "over what asks": "torch.einsum('bns,bnd->bsd', s.softmax(-1), h)",
    "over what is asked": "torch.einsum('bns,bnd->bsd', s.softmax(1), h)",
    "over both": "a = s.softmax(2)\n    y = torch.einsum('bns,bnd->bsd', a / a.sum(1, keepdim=True), h)",
    "by a product": "s.softmax(-1).transpose(1, 2) @ h",
}
SCORES = {
    "einsum": "torch.einsum('bnd,bsd->bns', h @ self.k, z @ self.q)",
    "a product": "(h @ self.k) @ (z @ self.q).transpose(1, 2)",
    "linear": "F.linear(h, self.k) @ F.linear(z, self.q).mT",
    "a batch of products": "torch.bmm(torch.matmul(h, self.k), torch.matmul(z, self.q).mT)",
}


@pytest.mark.parametrize("scores", SCORES)
@pytest.mark.parametrize("weighed", WEIGHED)
def test_what_meets_features_of_activations_is_no_memory(
    generated_models: ModuleType, scores: str, weighed: str
) -> None:
    """It makes queries and keys: matrices for certain."""
    text = (
        "def forward(self, x):\n    h = self.first(x).relu(); z = F.layer_norm(self.slots + h.mean(1, True), (16,))\n"
        f"    s = {SCORES[scores]}\n    y = {WEIGHED[weighed]}\n    return self.out(y.relu())"
    ).replace("y = a =", "a =")
    found = infer_roles(generated_models.model(MADE, text)())
    for name in ("q", "k"):
        assert (found[name].role, found[name].doubt) == (Role.MATRIX, Doubt.NONE), found[name].reason
