"""Weights of three axes that are laid flat for one product: of the sizes of what they meet, little is known."""

from types import ModuleType

import pytest

from megaopt_core.params import Doubt, Role
from megaopt_core.routing import infer_roles

MADE = (
    "self.e, self.r, self.h = nn.Embedding(30, 6), nn.Embedding(9, 4), nn.Linear(6, 30)\n"
    "self.w, self.turned = nn.Parameter(torch.zeros(4, 6, 6)), nn.Parameter(torch.zeros(6, 6, 4))"
)
FLAT = {
    "a size": "m = torch.mm(r, self.w.view(r.size(1), -1))",
    "a shape": "m = r @ self.w.reshape(r.shape[-1], -1)",
    "unpacked": "n, k = r.shape\nm = torch.matmul(r, self.w.view(k, -1))",
    "its own size": "m = r @ self.w.view(self.w.size(0), -1)",
    "flattened": "m = r @ self.w.flatten(1)",
    "turned": "m = r @ self.turned.view(-1, r.size(1)).t()",
    "a function": "m = F.linear(r, self.turned.reshape(-1, r.size(-1)))",
}


@pytest.mark.parametrize("case", FLAT)
def test_a_core_that_is_laid_flat(generated_models: ModuleType, case: str) -> None:
    """The axis that a product sums over is seen, so that it is a matrix, and certainly so."""
    forward = f"e, r = self.e(ids), self.r(more)\n{FLAT[case]}\nm = m.view(-1, e.size(1), e.size(1))\n"
    forward += "return self.h(torch.bmm(e.view(-1, 1, e.size(1)), m).view(-1, e.size(1)))"
    found = infer_roles(generated_models.model_with_forward(MADE, "ids, more", forward)())
    core = found["turned" if "turned" in FLAT[case] else "w"]
    assert (core.role, core.doubt) == (Role.MATRIX, Doubt.NONE), core.reason
