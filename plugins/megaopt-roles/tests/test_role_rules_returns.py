"""What a model returns in several ways, or scores by a loss: its last projections are its heads."""

import textwrap
from types import ModuleType

import pytest
import torch

from megaopt_core.params import Role, RoleDecision
from megaopt_core.params._roles import Doubt
from megaopt_core.routing import infer_roles

BRANCHES = {  # returns of two branches: dictionaries of different keys
    "probabilities, and a loss in training": (
        "p = self.o(self.a(x).relu()).sigmoid()\n"
        "if y is not None:\n    return {'prob': p, 'loss': F.binary_cross_entropy(p, y)}\nreturn {'prob': p}"
    ),
    "a loss alone": (
        "p = self.o(self.a(x).relu()).sigmoid()\n"
        "if y is not None:\n    return {'loss': F.binary_cross_entropy(p, y)}\nreturn {'prob': p}"
    ),
    "two uses of one net": (
        "if self.training:\n    return {'loss': F.mse_loss(self.o(self.a(x + y).relu()), y)}\n"
        "return {'action': self.o(self.a(x).relu())}"
    ),
    "one dictionary, put together in branches": (
        "p = self.o(self.a(x).relu())\nif y is None:\n    out = {'prob': p}\n"
        "else:\n    out = {'loss': F.mse_loss(p, y)}\nreturn out"
    ),
}


def roles_of(models: ModuleType, made: str, forward: str) -> dict[str, RoleDecision]:
    """Return the decisions for a model."""
    methods = f"def forward(self, x, y=None):\n{textwrap.indent(forward, ' ' * 4)}"
    with torch.device("meta"):
        return infer_roles(models.model(made, methods)())


@pytest.mark.parametrize("case", BRANCHES)
def test_dictionaries_of_different_keys(generated_models, case):
    """What either branch returns is returned."""
    found = roles_of(generated_models, "self.a, self.o = nn.Linear(8, 9), nn.Linear(9, 1)", BRANCHES[case])
    head = found["o.weight"]
    assert (head.role, head.doubt) == (Role.OUTPUT, Doubt.NONE), head.reason
    assert (found["a.weight"].role, found["a.weight"].doubt) == (Role.MATRIX, Doubt.NONE)
