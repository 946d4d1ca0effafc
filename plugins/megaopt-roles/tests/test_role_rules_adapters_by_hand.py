"""Low-rank adapters that are written by hand around a layer, whose factors are bare parameters."""

from types import ModuleType

import pytest
import torch

from megaopt_core.params import Doubt, Role
from megaopt_core.routing import infer_roles

HOLDERS = ["base_layer", "base", "linear"]
"""What the adapted layer is called: the first is what well-known packages call it."""

FORWARDS = {
    "one line": "return self.{base}(x) + (x @ self.lora_A.T @ self.lora_B.T) * self.scaling",
    "functions": "return self.{base}(x) + F.linear(F.linear(self.drop(x), self.lora_A), self.lora_B)",
    "merged": "return F.linear(x, self.{base}.weight + self.lora_B @ self.lora_A, self.{base}.bias)",
}


@pytest.mark.parametrize("base", HOLDERS)
@pytest.mark.parametrize("case", FORWARDS)
def test_factors_of_hidden_layers_are_matrices_for_certain(
    generated_models: ModuleType, case: str, base: str
) -> None:
    """Whatever the layer is called, and those of a head are none."""
    adapter = generated_models.module(
        "class Adapter(nn.Module):\n    def __init__(self, layer, rank=3):\n        super().__init__()\n"
        f"        self.{base}, self.scaling, self.drop = layer, 2.0, nn.Dropout(0.1)\n"
        "        self.lora_A = nn.Parameter(torch.randn(rank, layer.in_features))\n"
        "        self.lora_B = nn.Parameter(torch.zeros(layer.out_features, rank))\n\n"
        f"    def forward(self, x):\n        {FORWARDS[case].format(base=base)}\n",
        "Adapter",
    )
    made = "self.up, self.down, self.head = nn.Linear(12, 20), nn.Linear(20, 12), nn.Linear(12, 7)"
    text = "def forward(self, x):\n    x = x + self.down(self.up(x).relu())\n    return self.head(x)\n"
    model = generated_models.model(made, text)()
    for name in ("up", "down", "head"):
        setattr(model, name, adapter(getattr(model, name)))
    model(torch.randn(2, 12))
    found = infer_roles(model)
    for name in ("up", "down"):
        for part in ("lora_A", "lora_B", f"{base}.weight"):
            decision = found[f"{name}.{part}"]
            assert (decision.role, decision.doubt) == (Role.MATRIX, Doubt.NONE), (name, part, decision.reason)
    last = [found["head.lora_B"], found[f"head.{base}.weight"]]
    assert all(decision.role is Role.OUTPUT or decision.uncertain for decision in last), last
