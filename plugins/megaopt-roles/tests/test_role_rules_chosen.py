"""Softmaxes that are sharpened before they choose, and torch's own layers behind `super()`."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch

from megaopt_core.params import Doubt, Role
from megaopt_core.routing import infer_roles

SHARPENED = {  # what is done to `a`, a softmax over the rows of a memory
    "as it is": "a",
    "scaled": "a * 2 - 0.1",
    "cut hard": "F.relu(a - 0.02) * a / ((a - 0.02).abs() + 1e-12)",
    "cut hard, and shares again": "F.normalize(F.relu(a - 0.02) * a / ((a - 0.02).abs() + 1e-12), p=1, dim=1)",
    "masked": "a * (a > 0.1)",
    "masked by what is given": "a * mask",
    "squared": "a * a / (a * a).sum(-1, keepdim=True)",
}


@pytest.mark.parametrize("case", SHARPENED)
def test_memories_behind_sharpened_softmaxes(generated_models: ModuleType, case: str) -> None:
    """The rows that a softmax weighs are looked up, a little of each, however it is sharpened: no certain matrix."""
    made = "self.a, self.mem, self.h = nn.Linear(6, 8), nn.Parameter(torch.zeros(20, 8)), nn.Linear(8, 5)"
    forward = (
        "z = self.a(x).relu()\na = (z @ self.mem.T).softmax(-1)\n"
        f"y = ({SHARPENED[case]}) @ self.mem\nreturn self.h(y.relu())"
    )
    with torch.device("meta"):
        found = infer_roles(generated_models.model_with_forward(made, "x, mask=None", forward)())["mem"]
    assert (found.role, found.doubt) == (Role.ELEMENTWISE, Doubt.ROLE), found.reason


def test_a_gate_is_no_choice(generated_models: ModuleType) -> None:
    """What shares of something else multiply is made by a layer as any other."""
    made = "self.a, self.b, self.c, self.h = (nn.Linear(8, 8) for _ in range(4))"
    forward = "g = self.a(x).softmax(-1)\nreturn self.h(self.c(g * self.b(x)).relu()).sum(-1)"
    with torch.device("meta"):
        found = infer_roles(generated_models.model_with_forward(made, "x", forward)())
    assert {found[f"{name}.weight"].role for name in "bc"} == {Role.MATRIX}


def test_torchs_layer_behind_super(generated_models: ModuleType) -> None:
    """A subclass that only says how it is called has the layers of its parent, with certainty."""
    before = (
        "class Layer(nn.TransformerEncoderLayer):\n    def forward(self, x):\n"
        "        mask = nn.Transformer.generate_square_subsequent_mask(x.size(1))\n"
        "        return super().forward(x, src_mask=mask, is_causal=True)\n"
    )
    made = (
        "self.e, self.h = nn.Embedding(20, 16), nn.Linear(16, 20)\n"
        "self.body = nn.Sequential(*[Layer(16, 2, 32, batch_first=True) for _ in range(2)])"
    )
    kind = generated_models.model(
        made, "def forward(self, ids):\n    return self.h(self.body(self.e(ids)))", before
    )
    found = infer_roles(kind())
    hidden = {
        name: decision for name, decision in found.items() if name.startswith("body.") and "weight" in name
    }
    told = {name: (one.role, one.doubt) for name, one in hidden.items() if "norm" not in name}
    assert set(told.values()) == {(Role.MATRIX, Doubt.NONE)}, told
