"""Layers of somebody's own that inherit from one of torch's, and hold matrices beside its weight."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from megaopt_core.params import Role
from megaopt_core.routing import infer_roles

WIDTH, RANK, CLASSES = 12, 3, 17


class Adapted(nn.Linear):
    """Adds a product of two factors to what the weight makes."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.down = nn.Parameter(torch.randn(RANK, inputs))
        self.up = nn.Parameter(torch.randn(outputs, RANK))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return both."""
        return super().forward(x) + x @ self.down.T @ self.up.T


class AdaptedWeight(Adapted):
    """Adds the factors to the weight, and gives its rows a length."""

    @property
    def changed(self) -> torch.Tensor:
        """The weight and the factors."""
        return functional.normalize(self.weight + self.up @ self.down, dim=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return one product."""
        return functional.linear(x, self.changed, self.bias)


class AdaptedByLayers(nn.Linear):
    """Has layers for factors."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.down, self.up = nn.Linear(inputs, RANK, bias=False), nn.Linear(RANK, outputs, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return both."""
        return functional.linear(x, self.weight, self.bias) + torch.as_tensor(self.up(self.down(x)))


class Gated(nn.Linear):
    """Multiplies with a gate of its own."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.gate = nn.Parameter(torch.randn(inputs, outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the product."""
        return super().forward(x) * torch.sigmoid(x @ self.gate)


class AdaptedConv(nn.Conv1d):
    """Adds a narrow convolution to a wide one."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, 3, padding=1)
        self.up = nn.Conv1d(inputs, outputs, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return both."""
        x = x.transpose(1, 2)
        return (super().forward(x) + torch.as_tensor(self.up(x))).transpose(1, 2)


class Model(nn.Module):
    """A block and a head of such layers."""

    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.table = nn.Embedding(CLASSES, WIDTH)
        self.wide, self.narrow, self.head = kind(WIDTH, 20), kind(20, WIDTH), kind(WIDTH, CLASSES)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return scores."""
        x = self.table(ids)
        x = x + self.narrow(functional.gelu(self.wide(x)))
        return torch.as_tensor(self.head(x))


@pytest.mark.parametrize("kind", [Adapted, AdaptedWeight, AdaptedByLayers, Gated, AdaptedConv])
def test_what_a_layer_holds_beside_its_weight_goes_where_that_does(kind: type[nn.Module]) -> None:
    """It is a certain matrix in a hidden layer; what ends in the output of a head is an output."""
    model = Model(kind)
    assert model(torch.zeros(2, 4, dtype=torch.long)).shape == (2, 4, CLASSES)
    found = infer_roles(model)
    for name, param in model.named_parameters():
        if param.dim() > 1 and name.startswith(("wide", "narrow")):
            assert (found[name].role, found[name].uncertain) == (Role.MATRIX, False), (name, found[name])
    last = "gate" if kind is Gated else "up"
    heads = [name for name in found if name.startswith(f"head.{last}") and not name.endswith("bias")]
    for name in ("head.weight", *heads):
        assert (found[name].role, found[name].uncertain) == (Role.OUTPUT, False), (name, found[name])
