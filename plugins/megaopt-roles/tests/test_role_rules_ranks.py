"""Forwards that are read with activations of several ranks: a reading that a layer contradicts cuts nothing apart."""

from typing import Any

import pytest
import torch
from megaopt_roles.forward.weights.einsums import with_letters
from torch import nn
from torch.nn import functional

from megaopt_core.params import Role
from megaopt_core.routing import infer_roles


class Positions(nn.Module):
    """Hands the positions of what a layer makes to a cell, one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.cell, self.head = nn.Linear(6, 8), nn.GRUCell(8, 8), nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Index positions."""
        made, h = self.layer(x), torch.zeros(x.size(0), 8)
        for position in range(made.size(1)):
            h = self.cell(made[:, position], h)
        return self.head(h)


class Unbound(Positions):
    """The same by unbind."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Unbind positions."""
        h = torch.zeros(x.size(0), 8)
        for part in self.layer(x).unbind(1):
            h = self.cell(part, h)
        return self.head(h)


class Chunked(nn.Module):
    """Takes the loss of some positions at a time, by its head or by that head's weight."""

    def __init__(self, *, by_hand: bool) -> None:
        super().__init__()
        self.table, self.layer, self.head = nn.Embedding(64, 8), nn.Linear(8, 8), nn.Linear(8, 64)
        self.by_hand = by_hand

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Cut along the positions."""
        loss = torch.zeros(())
        made = self.layer(self.table(x)).flatten(0, 1)
        for part, target in zip(made.split(4), y.flatten().split(4), strict=True):
            logits = functional.linear(part, self.head.weight) if self.by_hand else self.head(part)
            loss = loss + functional.cross_entropy(logits, target)
        return loss


class Gated(nn.Module):
    """Cuts features apart, along the second dimension: of two."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(6, 16), nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Gate features."""
        gate, up = self.layer(x).chunk(2, dim=1)
        return self.head(functional.silu(gate) * up)


@pytest.mark.parametrize(
    ("model", "sizes"),
    [
        (Positions(), ()),
        (Unbound(), ()),
        (Chunked(by_hand=False), ()),
        (Chunked(by_hand=True), ()),
        (Gated(), (8, 8)),
    ],
    ids=["positions", "unbound", "chunked", "chunked by hand", "gated"],
)
def test_what_is_cut_are_features_only(model, sizes):
    """Positions that are taken apart do not split the layer that made them."""
    found = infer_roles(model)["layer.weight"]
    assert (found.role, found.uncertain, found.view.split_sizes) == (Role.MATRIX, False, sizes)


class ByHand(nn.Module):
    """A linear layer of somebody's own."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(outputs, inputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply."""
        return functional.linear(x, self.weight)


class OnlyByHand(nn.Module):
    """A block of such layers alone, that cuts what one of them returns."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = ByHand(8, 32), ByHand(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Gate features."""
        gate, up = self.up(x).chunk(2, -1)
        return x + self.down(functional.silu(gate) * up)


class Blocks(nn.Module):
    """Two such blocks between a table and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(64, 8), nn.Linear(8, 64)
        self.blocks = nn.ModuleList([OnlyByHand(), OnlyByHand()])

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Run all of them."""
        x = self.table(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def test_layers_by_hand_are_cut_apart_as_others_are():
    """A block whose layers are all somebody's own is read for what it takes apart."""
    found = infer_roles(Blocks())
    assert [found[f"blocks.{index}.up.weight"].view.split_sizes for index in (0, 1)] == [(16, 16)] * 2
    assert [found[f"blocks.{index}.down.weight"].view.split_sizes for index in (0, 1)] == [()] * 2


def affine(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Return what a layer of these parameters makes."""
    return x @ weight + bias


class Spread(nn.Module):
    """Spreads a dictionary of parameters, in a call or in another dictionary."""

    def __init__(self, *, twice: bool) -> None:
        super().__init__()
        self.layer = nn.ParameterDict({"weight": torch.zeros(8, 8), "bias": torch.zeros(8)})
        self.head, self.twice = nn.Linear(8, 4), twice

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Call with keywords."""
        names: Any = {**self.layer} if self.twice else self.layer
        return self.head(functional.relu(affine(x, **names)))


class Guarded(nn.Module):
    """Names a layer in the guard of a case."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({"first": nn.Linear(8, 8)})
        self.table, self.head = nn.Embedding(64, 8), nn.Linear(8, 64)

    def forward(self, x: torch.Tensor, kind: str = "plain") -> torch.Tensor:
        """Match."""
        h = self.table(x)
        match kind:
            case "plain" | "other" if (layer := self.layers["first"]) is not None:
                h = h + layer(h)
        return self.head(h)


@pytest.mark.parametrize(
    ("model", "name"),
    [
        (Spread(twice=False), "layer.weight"),
        (Spread(twice=True), "layer.weight"),
        (Guarded(), "layers.first.weight"),
    ],
    ids=["in a call", "in a dictionary", "guard"],
)
def test_matrices_that_are_reached_by_other_ways_are_certain(model, name):
    """What a call spreads and what a guard binds is followed."""
    found = infer_roles(model)[name]
    assert (found.role, found.uncertain) == (Role.MATRIX, False)


class Modulated(nn.Module):
    """A convolution whose kernel is made anew for each of the batch, as many groups as there are."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.style, self.last = nn.Conv2d(3, 8, 1), nn.Linear(4, 8), nn.Conv2d(8, 3, 1)
        self.kernel = nn.Parameter(torch.zeros(1, 8, 8, 3, 3))

    def forward(self, x: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        """Modulate."""
        batch, x = x.shape[0], self.first(x)
        kernel = (self.kernel * self.style(z).view(batch, 1, 8, 1, 1)).view(batch * 8, 8, 3, 3)
        made = functional.conv2d(x.view(1, batch * 8, *x.shape[2:]), kernel, padding=1, groups=batch)
        return self.last(made.view(batch, 8, *x.shape[2:]))


def test_a_kernel_that_is_made_anew_for_each_of_the_batch_is_no_depthwise_one():
    """A modulated kernel is a matrix, however many groups there are."""
    found = infer_roles(Modulated())["kernel"]
    assert (found.role, found.uncertain) == (Role.MATRIX, False)


class Coded(nn.Module):
    """Turns one-hot codes around, or lays them side by side, before a layer takes them."""

    def __init__(self, layer: nn.Module, *, flat: bool) -> None:
        super().__init__()
        self.table, self.hidden, self.head, self.flat = layer, nn.Linear(8, 8), nn.Linear(8, 32), flat

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Encode, and take."""
        codes = functional.one_hot(ids, 32).float()
        made = (
            self.table(codes.flatten(1)) if self.flat else self.table(codes.transpose(1, 2)).transpose(1, 2)
        )
        return self.head(functional.relu(self.hidden(functional.relu(made))))


@pytest.mark.parametrize(
    "model",
    [Coded(nn.Conv1d(32, 8, 1), flat=False), Coded(nn.Linear(96, 8), flat=True)],
    ids=["transposed", "flattened"],
)
def test_one_hot_codes_stay_codes(model):
    """What takes one-hot codes is a table, also when their axes have changed places."""
    found = infer_roles(model)
    assert found["table.weight"].role is not Role.MATRIX
    assert (found["hidden.weight"].role, found["hidden.weight"].uncertain) == (Role.MATRIX, False)


@pytest.mark.parametrize(
    ("pattern", "equation"),
    [
        ("b p d, n d h -> b p n h", "abc,dce->abde"),
        ("... d_in,d_out d_in->... d_out", "...a,ba->...b"),
        ("b (n h), h d -> b d", None),
        ("b 1 d, d k -> b k", None),
    ],
)
def test_names_of_axes_become_letters(pattern, equation):
    """An einsum of named axes is read as torch's; what has no name of its own is not."""
    assert with_letters(pattern) == equation
