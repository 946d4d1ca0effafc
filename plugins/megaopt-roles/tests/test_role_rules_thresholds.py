"""Activations that a threshold makes zeros and ones: no gradient goes through, and they are not fixed."""

from types import ModuleType

import pytest

from megaopt_core.params import Doubt, Role
from megaopt_core.routing import infer_roles

MADE = "self.w, self.v, self.h = nn.Parameter(torch.zeros(9, 8)), nn.Parameter(torch.zeros(8, 8)), nn.Linear(8, 5)"
STEPS = {
    "larger": "s = (x > 0).float()",
    "between": "s = (0.1 <= x).to(torch.float32)",
    "a mean": "s = (x >= x.mean(-1, keepdim=True)) * 1.0",
    "unequal": "s = (x != 0).type(torch.float32)",
    "a function": "s = torch.gt(x, 0).float()",
}


@pytest.mark.parametrize("case", STEPS)
def test_what_meets_ones_and_zeros_is_a_matrix(generated_models: ModuleType, case: str) -> None:
    """A product with what is given contracts a weight, whatever was done to it before."""
    forward = f"{STEPS[case]}\ny = s @ self.w\nreturn self.h(((y > 1).float() @ self.v + y).relu())"
    found = infer_roles(generated_models.model_with_forward(MADE, "x", forward)())
    for name in ("w", "v"):
        assert (found[name].role, found[name].doubt) == (Role.MATRIX, Doubt.NONE), (name, found[name].reason)
