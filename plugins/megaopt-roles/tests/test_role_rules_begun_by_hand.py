"""Loops whose first round takes what the model fills in itself: no layer takes an output in place of an input there."""

from types import ModuleType

import pytest
import torch

from megaopt_core.params import Doubt, Role
from megaopt_core.routing import infer_roles

MADE = (
    "self.embed, self.mix, self.step = nn.Linear(4, 12), nn.Linear(12, 12), nn.Linear(13, 12)\n"
    "self.start, self.score = nn.Parameter(torch.zeros(12)), nn.Linear(12, 1)\n"
)
FORWARD = (
    "nodes = self.embed(x)\nnodes = nodes + self.mix(nodes).relu()\n"
    "last, left, found = self.start.expand(len(nodes), -1), {}, []\n"
    "for _ in range(3):\n    q = self.step(torch.cat([last, left], -1)).relu()\n"
    "    found.append(self.score(q))\n    last, left = nodes[:, 1], left - 0.1\n"
    "return torch.cat(found, -1)"
)
FILLED = {
    "as a tensor": "nodes.new_ones(len(nodes), 1)",
    "of a value": "nodes.new_full((len(nodes), 1), 2.0)",
    "as large as another": "torch.ones_like(nodes[:, 0, :1])",
    "of a value, as large as another": "torch.full_like(nodes[:, 0, :1], 2.0)",
    "by itself": "torch.ones(len(nodes), 1)",
}


@pytest.mark.parametrize("case", FILLED)
def test_what_a_model_fills_in_is_not_given(generated_models: ModuleType, case: str) -> None:
    """The layers of an encoder before the loop are hidden."""
    model = generated_models.model_with_forward(MADE, "x", FORWARD.format(FILLED[case]))()
    assert model(torch.randn(2, 5, 4)).shape == (2, 3)
    found = infer_roles(model)
    for name in ("embed.weight", "mix.weight", "step.weight"):
        assert (found[name].role, found[name].doubt) == (Role.MATRIX, Doubt.NONE), (name, found[name].reason)
