"""Rounds of a loop: layers that all rounds share, and weights of which each round has its own."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from megaopt_core.params import Role
from megaopt_core.routing import infer_roles

WIDTH, RANK, CLASSES, ROUNDS = 12, 3, 17, 3


class Looped(nn.Module):
    """One block that is run several times; each round adds something of its own to what the block makes."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(CLASSES, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.inner, self.out = nn.Linear(WIDTH, 20), nn.Linear(20, WIDTH)
        self.down = nn.ParameterList([torch.randn(WIDTH, RANK) for _ in range(ROUNDS)])
        self.up = nn.ParameterList([torch.randn(RANK, 20) for _ in range(ROUNDS)])

    def own(self, x: torch.Tensor, turn: int) -> torch.Tensor:
        """Return what a round adds."""
        return x @ self.down[turn] @ self.up[turn]

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return scores."""
        x = self.table(ids)
        for turn in range(ROUNDS):
            inside = self.inner(x) + self.own(x, turn)
            x = x + self.out(functional.gelu(inside))
        return torch.as_tensor(self.head(x))


class LaterOnly(Looped):
    """The first round has nothing of its own."""

    def own(self, x: torch.Tensor, turn: int) -> torch.Tensor:
        """Return what a round adds."""
        return torch.matmul(x @ self.down[turn], self.up[turn]) if turn else x.new_zeros(())


class ByEinsum(Looped):
    """The same with letters."""

    def own(self, x: torch.Tensor, turn: int) -> torch.Tensor:
        """Return what a round adds."""
        return torch.einsum("btd,dr,rf->btf", x, self.down[turn], self.up[turn])


class OfLayers(Looped):
    """Layers of each round."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([nn.Linear(WIDTH, RANK) for _ in range(ROUNDS)])  # type: ignore[assignment]
        self.up = nn.ModuleList([nn.Linear(RANK, 20) for _ in range(ROUNDS)])  # type: ignore[assignment]

    def own(self, x: torch.Tensor, turn: int) -> torch.Tensor:
        """Return what a round adds."""
        return torch.as_tensor(self.up[turn](self.down[turn](x)))


class While(Looped):
    """Counts by itself."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return scores."""
        x, turn = self.table(ids), 0
        while turn < ROUNDS:
            x = x + self.out(functional.gelu(self.inner(x) + functional.linear(x, self.kernel(turn))))
            turn += 1
        return torch.as_tensor(self.head(x))

    def kernel(self, turn: int) -> torch.Tensor:
        """Return the weight of one round."""
        return (self.down[turn] @ self.up[turn]).T


@pytest.mark.parametrize("kind", [Looped, LaterOnly, ByEinsum, OfLayers, While])
def test_what_a_shared_layer_takes_in_a_later_round_is_hidden(kind: type[Looped]) -> None:
    """It stands before the layer in every round, whichever weights it has."""
    model = kind()
    assert model(torch.zeros(2, 4, dtype=torch.long)).shape == (2, 4, CLASSES)
    found = infer_roles(model)
    own = [name for name in found if name.startswith(("down", "up")) and not name.endswith("bias")]
    used = own if kind is not LaterOnly else [name for name in own if not name.startswith(("down.0", "up.0"))]
    for name in used:
        assert (found[name].role, found[name].uncertain) == (Role.MATRIX, False), (name, found[name])


class FedBack(nn.Module):
    """Makes a prediction in each round, of which the next one begins."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.Linear(CLASSES, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.weights = nn.ParameterList([torch.randn(WIDTH, CLASSES) for _ in range(ROUNDS)])

    def predicted(self, hidden: torch.Tensor, turn: int) -> torch.Tensor:
        """Return scores."""
        return torch.as_tensor(self.head(hidden))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the scores of all rounds."""
        found = []
        for turn in range(ROUNDS):
            x = self.predicted(torch.tanh(self.cell(x)), turn)
            found.append(x)
        return torch.stack(found)


class FedBackByHand(FedBack):
    """The same with a product, of other weights each time."""

    def predicted(self, hidden: torch.Tensor, turn: int) -> torch.Tensor:
        """Return scores."""
        return hidden @ self.weights[turn]


@pytest.mark.parametrize(("kind", "name"), [(FedBack, "head"), (FedBackByHand, "weights")])
def test_what_is_fed_back_is_no_certain_matrix(kind: type[FedBack], name: str) -> None:
    """It stands behind the layer that takes it in the next round."""
    model = kind()
    assert model(torch.randn(2, CLASSES)).shape == (ROUNDS, 2, CLASSES)
    found = infer_roles(model)
    for key, decision in found.items():
        if key.startswith(name) and not key.endswith("bias"):
            assert decision.role is Role.OUTPUT or decision.uncertain, (key, decision)
