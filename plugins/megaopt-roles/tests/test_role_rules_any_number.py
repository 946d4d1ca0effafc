"""Forwards that take any number of arguments: as many as there are layers for them, say."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from megaopt_core.params import Role
from megaopt_core.routing import infer_roles

WIDTH, COUNT = 12, 3


class Fused(nn.Module):
    """A layer for each input, and one for all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, 20) for _ in range(COUNT)])
        self.mixed, self.head = nn.Linear(20, 16), nn.Linear(16, 5)

    def scores(self, x: torch.Tensor) -> torch.Tensor:
        """Return what comes of the sum."""
        return torch.as_tensor(self.head(functional.gelu(self.mixed(x))))

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        """Return scores."""
        return self.scores(sum(layer(x) for layer, x in zip(self.layers, inputs, strict=True)))  # type: ignore[arg-type]


class Counted(Fused):
    """Counts its inputs."""

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        """Return scores."""
        found = [self.layers[at](x) for at, x in enumerate(inputs)]
        return self.scores(torch.stack(found).sum(0))


class Stated(Fused):
    """Keeps states between its layers, if it is given some."""

    def forward(self, x: torch.Tensor, *states: torch.Tensor) -> torch.Tensor:
        """Return scores."""
        given = list(states) or [None] * COUNT
        total = self.layers[0].weight.new_zeros(())
        for layer, state in zip(self.layers, given, strict=True):
            total = total + functional.silu(layer(x if state is None else x + state))
        return self.scores(total)


class Beginning(Fused):
    """Takes the first one apart from the others."""

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        """Return scores."""
        x, *others = inputs
        total = self.layers[0](x)
        for layer, other in zip(self.layers[1:], others, strict=True):
            total = total * layer(other).sigmoid()
        return self.scores(total)


class Chosen(Fused):
    """Is told by their number what they are."""

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        """Return scores."""
        if len(inputs) == 1:
            return self.scores(self.layers[0](inputs[0]))
        first, second, third = inputs
        gated = self.layers[1](second) * torch.sigmoid(self.layers[2](third))
        return self.scores(self.layers[0](first) + gated)


@pytest.mark.parametrize("kind", [Fused, Counted, Stated, Beginning, Chosen])
def test_each_of_any_number_of_arguments_meets_its_layer(kind: type[Fused]) -> None:
    """All of the layers are certain matrices."""
    model = kind()
    assert model(*[torch.randn(2, WIDTH)] * (COUNT + (kind is Stated))).shape == (2, 5)
    found = infer_roles(model)
    for name in (*(f"layers.{at}.weight" for at in range(COUNT)), "mixed.weight"):
        assert (found[name].role, found[name].uncertain) == (Role.MATRIX, False), (name, found[name])
    assert (found["head.weight"].role, found["head.weight"].uncertain) == (Role.OUTPUT, False)
