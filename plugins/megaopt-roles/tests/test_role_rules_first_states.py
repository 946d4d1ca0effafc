"""States that a recurrence by hand begins with: zeros, as they are or in another shape."""

from types import ModuleType

import pytest

from megaopt_core.params import Doubt, Role
from megaopt_core.routing import infer_roles

FIRST = {
    "as they are": "h = torch.zeros(len(x), 16)",
    "of several": "h = torch.zeros(2, len(x), 16)[0]",
    "an item of a pair": "h, _ = [s[0] for s in (torch.zeros(1, len(x), 16), torch.zeros(1, len(x), 16))]",
    "without an axis": "h = torch.zeros(1, len(x), 16).squeeze(0)",
    "expanded": "h = torch.zeros(1, 16).expand(len(x), -1)",
    "taken apart": "h, _ = torch.zeros(len(x), 32).chunk(2, -1)",
}


@pytest.mark.parametrize("case", FIRST)
@pytest.mark.parametrize("weight", ["self.w.t()", "F.dropout(self.w, 0.2, self.training).t()"])
def test_a_matrix_that_meets_a_first_state(generated_models: ModuleType, case: str, weight: str) -> None:
    """A matrix for certain: what is fixed in the first round is an activation in the next."""
    text = (
        f"def forward(self, x):\n    {FIRST[case]}\n    w = {weight}\n    for t in range(x.size(1)):\n"
        "        h = torch.tanh(self.up(x[:, t]) + h @ w)\n    return self.out(h)"
    )
    made = "self.up, self.w, self.out = nn.Linear(9, 16), nn.Parameter(torch.randn(16, 16)), nn.Linear(16, 5)"
    found = infer_roles(generated_models.model(made, text)())["w"]
    assert (found.role, found.doubt) == (Role.MATRIX, Doubt.NONE), found.reason
