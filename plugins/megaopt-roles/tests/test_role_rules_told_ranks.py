"""Recurrences over positions, whose indices and letters tell how many axes activations have."""

from types import ModuleType

import pytest
import torch

from megaopt_core.params import Doubt, Role
from megaopt_core.routing import infer_roles

DELTA = {  # recurrences over positions: indices and letters that only activations of three axes have
    "letters": "torch.einsum('bhk,bhkv->bhv', k[:, t], state)",
    "an index": "(k[:, t, :, :, None] * state).sum(-2)",
}


@pytest.mark.parametrize("case", DELTA)
def test_what_no_other_rank_has_tells_the_rank(generated_models: ModuleType, case: str) -> None:
    """Heads that a loop over positions is mistaken for, at a wrong rank, are no parts of a fused matrix."""
    made = (
        "self.k, self.v, self.beta = nn.Linear(12, 8), nn.Linear(12, 8), nn.Linear(12, 2)\n"
        "self.out = nn.Linear(8, 5)"
    )
    text = (
        "def forward(self, x):\n"
        "    k, v = (layer(x).unflatten(-1, (2, 4)) for layer in (self.k, self.v))\n"
        "    rate, made = self.beta(x).sigmoid(), []\n"
        "    state = k.new_zeros(k.size(0), 2, 4, 4)\n"
        "    for t in range(k.size(1)):\n"
        "        state = state * rate[:, t, :, None, None]\n"
        f"        error = v[:, t] - {DELTA[case]}\n"
        "        state = state + torch.einsum('bhk,bhv->bhkv', k[:, t], error)\n"
        "        made.append(torch.einsum('bhk,bhkv->bhv', k[:, t], state).flatten(1))\n"
        "    return self.out(torch.stack(made, 1))\n"
    )
    model = generated_models.model(made, text)()
    model(torch.zeros(3, 6, 12))
    found = infer_roles(model)
    for name in ("k.weight", "v.weight", "beta.weight"):
        view = found[name].view
        assert (found[name].role, found[name].doubt) == (Role.MATRIX, Doubt.NONE), found[name].reason
        assert view is not None
        assert view.split_sizes == ()
