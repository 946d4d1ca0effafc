"""Weights that are made of two factors before they meet anything: the factor that takes the activation is no head."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from megaopt_core.params import Role
from megaopt_core.routing import infer_roles

WIDTH, RANK, CLASSES = 12, 3, 17


class Factored(nn.Module):
    """A layer of low rank."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.first, self.last = (
            nn.Parameter(torch.randn(RANK, inputs)),
            nn.Parameter(torch.randn(outputs, RANK)),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the product."""
        return functional.linear(x, self.last @ self.first)


class Turned(Factored):
    """The same from the other side."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the product."""
        return x @ (self.first.T @ self.last.T)


class TurnedLater(Factored):
    """Turns the product."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the product."""
        return torch.matmul(x, torch.mm(self.last, self.first).t())


class WithLetters(Factored):
    """Writes both products with letters."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the product."""
        return torch.einsum("btd,fd->btf", x, torch.einsum("fr,rd->fd", self.last, self.first))


class WithLettersTurned(Factored):
    """The same from the other side."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the product."""
        return torch.einsum("btd,df->btf", x, torch.einsum("fr,rd->df", self.last, self.first))


class Added(Factored):
    """Adds them to a whole weight."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.base = nn.Linear(inputs, outputs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the product."""
        return functional.linear(x, self.base.weight + 0.5 * (self.last @ self.first), self.base.bias)


class Model(nn.Module):
    """Layers of any kind, and a head of it."""

    def __init__(self, kind: type[Factored]) -> None:
        super().__init__()
        self.table = nn.Embedding(CLASSES, WIDTH)
        self.wide, self.narrow, self.head = kind(WIDTH, 20), kind(20, WIDTH), kind(WIDTH, CLASSES)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return scores."""
        x = self.table(ids)
        return torch.as_tensor(self.head(x + self.narrow(functional.gelu(self.wide(x)))))


@pytest.mark.parametrize("kind", [Factored, Turned, TurnedLater, WithLetters, WithLettersTurned, Added])
def test_only_the_last_factor_of_a_head_is_an_output(kind: type[Factored]) -> None:
    """The first one makes what that takes."""
    model = Model(kind)
    assert model(torch.zeros(2, 4, dtype=torch.long)).shape == (2, 4, CLASSES)
    found = infer_roles(model)
    hidden = [
        "head.first",
        *(f"{layer}.{part}" for layer in ("wide", "narrow") for part in ("first", "last")),
    ]
    for name in hidden:
        assert (found[name].role, found[name].uncertain) == (Role.MATRIX, False), (name, found[name])
    assert (found["head.last"].role, found["head.last"].uncertain) == (Role.OUTPUT, False), found["head.last"]
