"""What an einsum with a weight returns comes from the weight, and from no layer before it."""

from types import ModuleType

import pytest
import torch

from megaopt_core.params import Doubt, Role
from megaopt_core.routing import infer_roles

MADE = "self.a = nn.Linear(6, 8)\n"
RETURNED = {  # a head that is an einsum: how it is made, its product
    "a matrix": ("self.w = nn.Parameter(torch.zeros(8, 8))", "torch.einsum('bi,io->bo', x, self.w)"),
    "turned": ("self.w = nn.Parameter(torch.zeros(5, 8))", "torch.einsum('oi,bi->bo', self.w, x)"),
    "scaled": (
        "self.w, self.s = nn.Parameter(torch.zeros(5, 8)), nn.Parameter(torch.zeros(5))",
        "torch.einsum('bi,oi,o->bo', x, self.w, self.s)",
    ),
    "a stack": ("self.w = nn.Parameter(torch.zeros(3, 8, 5))", "torch.einsum('bi,nio->nbo', x, self.w)"),
    "with something else": (
        "self.w = nn.Parameter(torch.zeros(5, 8))",
        "torch.einsum('bo,oi,bi->bo', torch.ones(4, 5), self.w, x)",
    ),
}


@pytest.mark.parametrize("case", RETURNED)
def test_a_layer_before_an_einsum_is_hidden(generated_models: ModuleType, case: str) -> None:
    """The layer is a matrix for certain; the weight of the einsum, which may be a head, is no certain matrix."""
    made, product = RETURNED[case]
    model = generated_models.model(
        MADE + made, f"def forward(self, x):\n    x = self.a(x)\n    return {product}"
    )()
    model(torch.randn(4, 6))
    found = infer_roles(model)
    hidden, head = found["a.weight"], found["w"]
    assert (hidden.role, hidden.doubt) == (Role.MATRIX, Doubt.NONE), hidden.reason
    assert head.role is Role.OUTPUT or head.doubt is Doubt.ROLE, head.reason
