"""Layers before a recurrent one whose state a model returns beside its prediction: they are hidden."""

from types import ModuleType

import pytest

from megaopt_core.params import Doubt, Role
from megaopt_core.routing import infer_roles

CELLS = {
    "LSTM": ("nn.LSTM(20, 28, batch_first=True)", "y, s = self.cell(h)\nreturn self.out(y), s"),
    "GRU, its last state": ("nn.GRU(20, 28)", "y, s = self.cell(h)\nreturn self.out(y), s[-1]"),
    "RNN, what it returns": (
        "nn.RNN(20, 28)",
        "y, _ = self.cell(h)\nreturn {'y': self.out(y), 'features': y}",
    ),
    "LSTMCell": ("nn.LSTMCell(20, 28)", "s = self.cell(h)\nreturn self.out(s[0]), s"),
    "GRUCell in a loop": (
        "nn.GRUCell(20, 28)",
        "s = x.new_zeros(len(x), 28)\nfor t in range(h.size(1)):\n    s = self.cell(h[:, t], s)\nreturn self.out(s), s",
    ),
}


@pytest.mark.parametrize("case", CELLS)
def test_what_a_recurrent_layer_takes_is_hidden(generated_models: ModuleType, case: str) -> None:
    """A recurrent layer is a layer: what it takes does not come through."""
    made, rest = CELLS[case]
    lines = ["def forward(self, x):", "    t = torch.sigmoid(self.gate(x))"]
    lines += [
        "    h = t * torch.relu(self.up(x)) + (1 - t) * self.side(x)",
        *(f"    {line}" for line in rest.split("\n")),
    ]
    layers = "self.gate, self.up, self.side = nn.Linear(9, 20), nn.Linear(9, 20), nn.Linear(9, 20)\n"
    model = generated_models.model(
        f"{layers}self.cell, self.out = {made}, nn.Linear(28, 5)", "\n".join(lines)
    )
    found = infer_roles(model())
    for name in ("gate.weight", "up.weight", "side.weight"):
        assert (found[name].role, found[name].doubt) == (Role.MATRIX, Doubt.NONE), found[name].reason
    assert (found["out.weight"].role, found["out.weight"].doubt) == (Role.OUTPUT, Doubt.NONE)
