"""Layers that a loop calls, one for each of what is given: how many that is, nobody knows before."""

import textwrap
from typing import Any

import pytest
import torch
from torch import nn

from megaopt_core.params import Doubt, Role
from megaopt_core.routing import infer_roles

SIZES = (5, 6, 7, 9)
PAIRED = "feats = {}\nreturn self.last(torch.cat(feats, -1))"
COUNTED = {  # what is given, and how the layers meet it
    "a zip with a comprehension": ("pairs", "[a(x) for a, x in zip(self.a, [x for x, _ in pairs])]"),
    "a zip of what follows": ("pairs", "[a(x) for x, a in zip(list(x for x, y in pairs), self.a)]"),
    "a zip with all arguments": ("*xs", "[a(x) for a, x in zip(self.a, xs)]"),
    "a map": ("pairs", "list(map(lambda a, x: a(x), self.a, [x.float() for x, _ in pairs]))"),
    "an enumeration": ("pairs", "[self.a[i](x) for i, x in enumerate(tuple(x for x, _ in pairs))]"),
    "a count": ("*xs", "[self.a[i](xs[i]) for i in range(len(xs))]"),
    "two zips": (
        "pairs",
        "[a(x) for a, (x, y) in zip(self.a, zip([x for x, _ in pairs], [y for _, y in pairs]))]",
    ),
}


def made(models: Any, arguments: str, body: str, sizes: tuple[int, ...]) -> nn.Module:
    """Return a model with one layer a size, of which a forward is written down."""
    layers = (
        f"self.a, self.last = nn.ModuleList(nn.Linear(n, 8) for n in {sizes}), nn.Linear({8 * len(sizes)}, 3)"
    )
    model: nn.Module = models.model(
        layers, f"def forward(self, {arguments}):\n" + textwrap.indent(body, "    ")
    )()
    return model


def check(model: nn.Module) -> None:
    """Every layer is a matrix, the last one a head, and all of that is certain."""
    found = infer_roles(model)
    for i in range(len(SIZES)):
        assert (found[f"a.{i}.weight"].role, found[f"a.{i}.weight"].doubt) == (Role.MATRIX, Doubt.NONE), i
    assert (found["last.weight"].role, found["last.weight"].doubt) == (Role.OUTPUT, Doubt.NONE)


@pytest.mark.parametrize("name", COUNTED)
def test_every_layer_is_called_for_one_of_what_is_given(generated_models: Any, name: str) -> None:
    """A list that is made of what is given is as long as the modules are that it is gone through with."""
    arguments, body = COUNTED[name]
    model = made(generated_models, arguments, PAIRED.format(body), SIZES)
    given = [torch.randn(2, size) for size in SIZES]
    assert model(*given if "*" in arguments else [[(x, x) for x in given]]).shape == (2, 3)
    check(model)
