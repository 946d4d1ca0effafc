"""What a loop puts something in the place of that it made of it is a first state, be it a buffer: weights meet it."""

from types import ModuleType

import pytest
import torch

from megaopt_core.params import Doubt, Role, RoleDecision
from megaopt_core.routing import infer_roles

MADE = """self.u, self.w = nn.Parameter(torch.zeros(6, 8)), nn.Parameter(torch.zeros(8, 8))
self.register_buffer("h0", torch.ones(2, 1, 8))
self.h = nn.Linear(8, 5)"""
BEGUN = {
    "a row": "s, c = self.h0[0], self.h0[1]",
    "expanded": "s, c = self.h0.expand(-1, len(x), -1)",
    "a tuple": "state = tuple(self.h0.expand(-1, len(x), -1))\ns, c = state",
    "unbound": "s, c = self.h0.unbind(0)",
    "a list": "s, c = [part for part in self.h0]",
}
LOOPS = {
    "for": "for t in x.unbind(1):\n    n = torch.tanh(t @ self.u + s @ self.w)\n    s, c = n * c.sigmoid(), n + c",
    "while": "i = 0\nwhile i < x.shape[1]:\n    s = torch.tanh(x[:, i] @ self.u + s @ self.w)\n    i += 1",
}


def weight(models: ModuleType, forward: str) -> RoleDecision:
    """Return the decision for `w`."""
    with torch.device("meta"):
        return infer_roles(models.model_with_forward(MADE, "x", f"{forward}\nreturn self.h(s)")())["w"]


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("begun", BEGUN)
def test_a_recurrence_that_begins_with_a_buffer(generated_models: ModuleType, begun: str, loop: str) -> None:
    """Its weight is a matrix for certain."""
    found = weight(generated_models, f"{BEGUN[begun]}\n{LOOPS[loop]}")
    assert (found.role, found.doubt) == (Role.MATRIX, Doubt.NONE), found.reason


def test_a_state_of_a_method(generated_models: ModuleType) -> None:
    """The steps may be made elsewhere."""
    cell = "step = lambda t, h: torch.tanh(t @ self.u + h @ self.w)"
    found = weight(generated_models, f"{cell}\ns = self.h0[0]\nfor t in x.unbind(1):\n    s = step(t, s)")
    assert (found.role, found.doubt) == (Role.MATRIX, Doubt.NONE), found.reason


def test_a_list_of_two_names_stays_one(generated_models: ModuleType) -> None:
    """What a loop puts into it under one of them is there under the other."""
    loop = "for t in x.unbind(1):\n    rows.append(torch.relu(t @ self.u) @ self.w)\n    rows = rows"
    found = weight(generated_models, f"kept = rows = []\n{loop}\ns = torch.stack(kept)")
    assert (found.role, found.doubt) == (Role.MATRIX, Doubt.NONE), found.reason


def test_what_stays_fixed_is_no_state(generated_models: ModuleType) -> None:
    """A loop that only reads a buffer multiplies a table with it."""
    found = weight(
        generated_models, "s = 0\nfor t in x.unbind(1):\n    s = s + t[:, :1] * (self.h0[0] @ self.w)"
    )
    assert found.doubt is Doubt.ROLE or found.role is Role.ELEMENTWISE, found.reason
