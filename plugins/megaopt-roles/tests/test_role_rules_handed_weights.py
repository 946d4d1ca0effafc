"""Weights that a module without parameters is handed: what it does with them is what they are."""

from types import ModuleType

import pytest

from megaopt_core.params import Doubt, Role
from megaopt_core.routing import infer_roles

BEFORE = """
class Mix(nn.Module):
    def forward(self, x, w):
        return torch.einsum("bvc,cd->bvd", (x, w)).contiguous()

class Product(nn.Module):
    def __init__(self, scale=1.0):
        super().__init__()
        self.scale, self.drop = scale, nn.Dropout(0.1)
    def forward(self, w, x):
        return self.drop(x @ w) * self.scale

class Chain(nn.Module):
    def __init__(self):
        super().__init__()
        self.mix, self.product = Mix(), Product()
    def forward(self, x, w):
        return self.product(w, self.mix(x, w).relu())

class Gain(nn.Module):
    def forward(self, x, w):
        return x * w[: x.shape[1]]
"""
MADE = (
    "self.a, self.h = nn.Linear(3, 8), nn.Linear(8, 5)\n"
    "self.w, self.mix, self.product = nn.Parameter(torch.zeros(8, 8)), Mix(), Product()\n"
    "self.chain, self.gain = Chain(), Gain()"
)
CASES = {
    "a module": "y = self.mix(x, self.w)",
    "by name": "y = self.mix(w=self.w, x=x)",
    "a module with a layer": "y = self.product(self.w, x)",
    "modules in a module": "y = self.chain(x, self.w)",
    "twice": "y = self.mix(self.mix(x, self.w), self.w)",
    "turned": "y = self.mix(x, self.w.t())",
}


@pytest.mark.parametrize("case", CASES)
def test_a_weight_that_a_module_multiplies_with(generated_models: ModuleType, case: str) -> None:
    """It is a matrix, as the layer before it is, and certainly so."""
    forward = f"def forward(self, x):\n    x = self.a(x)\n    {CASES[case]}\n    return self.h(y.relu())"
    found = infer_roles(generated_models.model(MADE, forward, BEFORE)())
    for name in ("w", "a.weight"):
        assert (found[name].role, found[name].doubt) == (Role.MATRIX, Doubt.NONE), (name, found[name].reason)


def test_a_weight_that_a_module_scales_with(generated_models: ModuleType) -> None:
    """What multiplies entry by entry inside is no matrix."""
    forward = "def forward(self, x):\n    return self.h(self.gain(self.a(x), self.w).relu())"
    found = infer_roles(generated_models.model(MADE, forward, BEFORE)())
    assert found["w"].role is Role.ELEMENTWISE
