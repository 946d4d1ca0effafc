"""Values of a dictionary that are spread, or summed up: they are followed to what takes them."""

from types import ModuleType

import pytest
import torch

from megaopt_core.params import Doubt, Role
from megaopt_core.routing import infer_roles

APART = "".join(f"self.{x}{y} = nn.Linear({size}, 16)\n" for x, size in (("a", 16), ("b", 12)) for y in "qkv")
ENDS = (
    "self.first, self.second = nn.Linear(7, 16), nn.Linear(7, 12)\n"
    "self.out, self.head = nn.Linear(16, 16), nn.Linear(16, 5)\n"
)
PARTS = {
    "zipped": (
        "made = {key: [getattr(self, key + part)(z) for part in 'qkv'] for key, z in (('a', x), ('b', y))}\n"
        "q, k, v = (heads(torch.cat(parts, dim=1)) for parts in zip(*made.values()))"
    ),
    "spread": (
        "made = {'a': (self.aq(x), self.ak(x), self.av(x)), 'b': (self.bq(y), self.bk(y), self.bv(y))}\n"
        "q, k, v = [heads(torch.cat(parts, 1)) for parts in map(list, zip(*made.values()))]"
    ),
}


@pytest.mark.parametrize("case", PARTS)
def test_parts_of_streams_in_a_dictionary_are_followed(generated_models: ModuleType, case: str) -> None:
    """What is spread from the values of a dictionary is taken by what takes them."""
    text = (
        "def forward(self, x, y):\n"
        "    heads = lambda z: z.unflatten(-1, (2, 8)).transpose(1, 2)\n"
        "    x, y = self.first(x), self.second(y)\n    " + PARTS[case].replace("\n", "\n    ") + "\n"
        "    z = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)\n"
        "    return self.head(x + self.out(z)[:, : x.shape[1]])\n"
    )
    model = generated_models.model(APART + ENDS, text)()
    assert model(torch.randn(4, 3, 7), torch.randn(4, 5, 7)).shape == (4, 3, 5)
    found = infer_roles(model)
    for name in (f"{x}{y}.weight" for x in "ab" for y in "qkv"):
        assert (found[name].role, found[name].doubt) == (Role.MATRIX, Doubt.NONE), (name, found[name].reason)


def test_a_sum_of_the_values_of_a_dictionary_is_followed(generated_models: ModuleType) -> None:
    """What is summed up of losses by name is returned: the heads behind them are outputs for certain."""
    text = (
        "def forward(self, x, y, z):\n    x = self.first(x).relu()\n"
        "    losses = {'a': F.mse_loss(self.a(x), y), 'b': F.mse_loss(self.b(x), z)}\n"
        "    return sum(losses.values())\n"
    )
    made = "self.first, self.a, self.b = nn.Linear(7, 16), nn.Linear(16, 5), nn.Linear(16, 3)"
    found = infer_roles(generated_models.model(made, text)())
    for name in ("a.weight", "b.weight"):
        assert (found[name].role, found[name].doubt) == (Role.OUTPUT, Doubt.NONE), (name, found[name].reason)
