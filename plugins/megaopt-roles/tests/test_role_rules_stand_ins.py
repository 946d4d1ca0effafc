"""Vectors that stand in for an activation that is not there: what follows takes the activation, too."""

from types import ModuleType

import pytest

from megaopt_core.params import Doubt, Role
from megaopt_core.routing import infer_roles

MADE = (
    "self.a, self.b, self.h = nn.Linear(9, 8), nn.Linear(8, 8), nn.Linear(8, 5)\n"
    "self.zero, self.row = nn.Parameter(torch.zeros(8)), nn.Parameter(torch.zeros(1, 8))\n"
    "self.w, self.many = nn.Parameter(torch.zeros(8, 8)), nn.Parameter(torch.zeros(6, 8))"
)
CASES = {
    "in a list": "parts = []\nfor at, n in sizes:\n"
    "    parts.append(self.zero if n == 0 else a[at : at + n].sum(0))\ny = self.b(torch.stack(parts))",
    "in a comprehension": "y = self.b(torch.stack([a[at : at + n].sum(0) if n else self.zero for at, n in sizes]))",
    "in a branch": "if sizes is None:\n    y = self.row\nelse:\n    y = a\ny = self.b(y)",
    "spread": "y = self.b(self.row.expand(3, -1) if sizes is None else a)",
    "in another branch": "y = a\nif sizes is None:\n    y = self.zero\ny = self.b(y).tanh()",
    "a row of several": "y = self.b(a if sizes is not None else self.many[0])",
    "by hand": "y = self.b((self.zero if sizes is None else a) @ self.w)",
    "a function": "y = self.b(F.linear(a if sizes is not None else self.row, self.w))",
}


@pytest.mark.parametrize("case", CASES)
def test_what_may_be_a_vector_is_still_an_activation(generated_models: ModuleType, case: str) -> None:
    """The layers before and behind it are matrices, and certainly so."""
    forward = f"a = self.a(x)\n{CASES[case]}\nreturn self.h(y.relu())"
    found = infer_roles(generated_models.model_with_forward(MADE, "x, sizes=None", forward)())
    expected = {"a.weight": Role.MATRIX, "b.weight": Role.MATRIX, "h.weight": Role.OUTPUT}
    if "self.w" in CASES[case]:
        expected["w"] = Role.MATRIX
    for name, role in expected.items():
        assert (found[name].role, found[name].doubt) == (role, Doubt.NONE), (name, found[name].reason)
