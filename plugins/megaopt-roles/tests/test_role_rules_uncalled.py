"""Lists of layers that are gone through as far as an input is long: further than the reader guesses."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from megaopt_core.params import Role
from megaopt_core.routing import infer_roles

WIDTH, CLASSES, COUNT = 12, 17, 7


class Streams(nn.Module):
    """A layer and a head for each of several streams of codes."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(CLASSES, 10)
        self.layers = nn.ModuleList([self.layer() for _ in range(COUNT)])
        self.mixed = nn.Linear(WIDTH, WIDTH)
        self.heads = nn.ModuleList([nn.Linear(WIDTH, CLASSES, bias=False) for _ in range(COUNT)])

    def layer(self) -> nn.Module:
        """Return what a stream has."""
        return nn.Linear(10, WIDTH)

    def forward(self, codes: torch.Tensor) -> torch.Tensor:
        """Return scores for each."""
        _, count, _ = codes.shape
        x = self.mixed(torch.stack([self.layers[at](self.table(codes[:, at])) for at in range(count)]).sum(0))
        return torch.stack([self.heads[at](functional.gelu(x)) for at in range(count)], 1)


class OfSeveral(Streams):
    """Has two layers for each stream."""

    def layer(self) -> nn.Module:
        """Return what a stream has."""
        return nn.Sequential(nn.Linear(10, 14), nn.GELU(), nn.Linear(14, WIDTH))


class Gated(nn.Module):
    """A block of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.gate, self.down = nn.Linear(10, 14), nn.Linear(10, 14), nn.Linear(14, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return one product."""
        return torch.as_tensor(self.down(self.up(x) * self.gate(x).sigmoid()))


class OfBlocks(Streams):
    """Has a block for each stream."""

    def layer(self) -> nn.Module:
        """Return what a stream has."""
        return Gated()


class Keyed(Streams):
    """Has them by names, and counts as it goes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({f"at {at}": layer for at, layer in enumerate(self.layers)})  # type: ignore[assignment]

    def forward(self, codes: torch.Tensor) -> torch.Tensor:
        """Return scores for each."""
        total, at = torch.zeros(WIDTH), 0
        while at < codes.size(1):
            total = total + self.layers[f"at {at}"](self.table(codes[:, at]))  # type: ignore[index]
            at += 1
        x = functional.gelu(self.mixed(total))
        return torch.stack([head(x) for head in self.heads], 1)


@pytest.mark.parametrize("kind", [Streams, OfSeveral, OfBlocks, Keyed])
def test_layers_behind_those_that_a_loop_calls_are_like_them(kind: type[Streams]) -> None:
    """All of them are hidden matrices, and all heads are heads."""
    model = kind()
    assert model(torch.zeros(2, COUNT, 4, dtype=torch.long)).shape == (2, COUNT, 4, CLASSES)
    found = infer_roles(model)
    for name, decision in found.items():
        if name.startswith(("layers", "heads")) and name.endswith("weight"):
            wanted = Role.OUTPUT if name.startswith("heads") else Role.MATRIX
            assert (decision.role, decision.uncertain) == (wanted, False), (name, decision)


class Unlike(Streams):
    """Calls each of two layers in a place of its own, and the third one nowhere."""

    def forward(self, codes: torch.Tensor) -> torch.Tensor:
        """Return scores."""
        x = self.table(codes[:, 0])
        x = self.mixed(functional.gelu(self.layers[0](x)) + self.layers[1](x).tanh())
        return torch.as_tensor(self.heads[0](x))


def test_a_layer_that_is_called_nowhere_stays_in_doubt() -> None:
    """Nothing says that what stands beside it in its list is like it."""
    found = infer_roles(Unlike())
    assert found["layers.2.weight"].uncertain
    assert not found["layers.1.weight"].uncertain
