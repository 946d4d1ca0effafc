"""Matrices of many relations, mixed from a few bases, whose products one sum adds up."""

from types import ModuleType

import pytest

from megaopt_core.params import Doubt, Role
from megaopt_core.routing import infer_roles

MIXED = {
    "einsum": "w = torch.einsum('rb,bio->rio', self.comp, self.bases)",
    "the bases first": "w = torch.einsum('bio,rb->rio', self.bases, self.comp)",
    "flat": "w = (self.comp @ self.bases.view(3, -1)).view(8, 16, 16)",
    "tensordot": "w = torch.tensordot(self.comp, self.bases, dims=1)",
}
SUMMED = {
    "neighbours and relations": "torch.einsum('rnm,mi,rio->no', a, x, w)",
    "relations of messages": "torch.einsum('rni,rio->no', torch.einsum('rnm,mi->rni', a, x), w)",
    "relation by relation": "sum(a[r] @ (x @ w[r]) for r in range(8))",
    "a batch of products": "torch.bmm(a @ x, w).sum(0)",
}


@pytest.mark.parametrize("mixed", MIXED)
@pytest.mark.parametrize("summed", SUMMED)
def test_bases_are_a_stack_and_coefficients_mix(
    generated_models: ModuleType, mixed: str, summed: str
) -> None:
    """Both are certain."""
    text = (
        f"def forward(self, x, a):\n    x = self.first(x)\n    {MIXED[mixed]}\n"
        f"    return self.out(({SUMMED[summed]} + x).relu())"
    )
    made = (
        "self.comp, self.bases = nn.Parameter(torch.randn(8, 3)), nn.Parameter(torch.randn(3, 16, 16))\n"
        "self.first, self.out = nn.Linear(9, 16), nn.Linear(16, 5)"
    )
    found = infer_roles(generated_models.model(made, text)())
    assert (found["bases"].role, found["bases"].doubt) == (Role.MATRIX, Doubt.NONE), found["bases"].reason
    assert found["bases"].view is not None
    assert found["bases"].view.batch_dims == 1
    assert (found["comp"].role, found["comp"].doubt) == (Role.ELEMENTWISE, Doubt.NONE), found["comp"].reason
