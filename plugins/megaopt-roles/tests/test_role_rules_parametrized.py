"""Parametrizations: the factors of what is added to a weight are what the weight is."""

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

from megaopt_core.params import Doubt, Role
from megaopt_core.routing import infer_roles


class LowRank(nn.Module):
    """Adds a product of two factors."""

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        self.down, self.up = nn.Parameter(torch.randn(3, columns)), nn.Parameter(torch.zeros(rows, 3))
        self.function = self.add

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        """Return the weight with more."""
        return weight + (self.up @ self.down) * 2.0

    def add(self, weight: torch.Tensor) -> torch.Tensor:
        """Return the same, in the shape of the weight."""
        return weight + torch.matmul(self.up, self.drop(self.down)).view(weight.shape) * 2.0

    def drop(self, factor: torch.Tensor) -> torch.Tensor:
        """Return a factor as it is."""
        return factor


class ByAttribute(LowRank):
    """The same by a function that it holds."""

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        """Return the weight with more."""
        return self.function(weight)


class Masked(LowRank):
    """Multiplies the weight with a table, entry by entry, beside."""

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__(rows, columns)
        self.mask = nn.Parameter(torch.zeros(rows, columns))

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        """Return the weight with more, and less."""
        return super().forward(weight) * self.mask.sigmoid()


def model_with(make: Callable[[int, int], nn.Module], at: int) -> nn.Module:
    """Return a model with a parametrization of one of its weights."""
    model = nn.Sequential(nn.Embedding(20, 8), nn.Linear(8, 9), nn.ReLU(), nn.Linear(9, 5))
    parametrize.register_parametrization(model[at], "weight", make(*model[at].weight.shape))
    assert model(torch.tensor([[1, 2]])).shape == (1, 2, 5)
    return model


@pytest.mark.parametrize("make", [LowRank, ByAttribute, Masked], ids=lambda make: make.__name__)
def test_factors_of_what_is_added_to_a_matrix_are_matrices(make: type[LowRank]) -> None:
    """The sum is what the layer multiplies with."""
    found = infer_roles(model_with(make, 1))
    for name in ("down", "up", "original"):
        decision = found[f"1.parametrizations.weight.{'' if name == 'original' else '0.'}{name}"]
        assert (decision.role, decision.doubt) == (Role.MATRIX, Doubt.NONE), (name, decision)


def test_a_table_that_masks_a_matrix_is_none() -> None:
    """It is used entry by entry."""
    assert infer_roles(model_with(Masked, 1))["1.parametrizations.weight.0.mask"].role is Role.ELEMENTWISE


@pytest.mark.parametrize("at", [0, 3])
def test_factors_of_what_is_added_to_a_table_or_a_head_are_none(at: int) -> None:
    """They train with it."""
    found = infer_roles(model_with(LowRank, at))
    for name in ("down", "up"):
        decision = found[f"{at}.parametrizations.weight.0.{name}"]
        assert (decision.role, decision.doubt) == (Role.ELEMENTWISE, Doubt.NONE), (name, decision)


MADE_WEIGHTS: dict[
    str, Callable[[nn.Module], nn.Module]
] = {  # what makes the weights of a layer, before each forward or as they are asked for
    "none": lambda layer: layer,
    "weight norm": parametrizations.weight_norm,
    "spectral norm": parametrizations.spectral_norm,
    "spectral norm by a hook": nn.utils.spectral_norm,
    "a mask by a hook": lambda layer: prune.l1_unstructured(layer, "weight", amount=0.3),
}


class Field(nn.Module):
    """A network of a shape, in the middle of which its input lies beside what a narrower layer makes."""

    def __init__(self, made: Callable[[nn.Module], nn.Module]) -> None:
        super().__init__()
        self.table = nn.Embedding(25, 16)
        sizes = [(19, 40), (40, 21), (40, 40), (40, 1)]
        self.layers = nn.ModuleList([made(nn.Linear(*size)) for size in sizes])

    def forward(self, number: torch.Tensor, xyz: torch.Tensor) -> torch.Tensor:
        """Return distances."""
        given = torch.cat([self.table(number), xyz], -1)
        x = given
        for i, layer in enumerate(self.layers):
            x = torch.cat([x, given], 1) if i == 2 else x
            x = layer(x)
            x = x.relu() if i < 3 else x
        return x.tanh()


@pytest.mark.parametrize("how", MADE_WEIGHTS)
def test_activations_of_layers_whose_weights_are_made(how: str) -> None:
    """What is done with the output of such a layer is noted as with that of a plain one: it is hidden, certainly."""
    model = Field(MADE_WEIGHTS[how])
    model(torch.arange(4), torch.randn(4, 3))
    found = infer_roles(model)
    narrow = [
        one
        for name, one in found.items()
        if name.startswith("layers.1.") and model.get_parameter(name).dim() > 1
    ]
    decided = {(one.role, one.doubt) for one in narrow if one.role is not Role.ELEMENTWISE}
    assert decided == {(Role.MATRIX, Doubt.NONE)}, narrow
