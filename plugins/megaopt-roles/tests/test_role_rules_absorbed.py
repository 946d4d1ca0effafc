"""Weights that are cut head by head before their products, as latent attention absorbs them."""

import pytest
import torch
from torch import nn

from megaopt_core.params import Role
from megaopt_core.routing import infer_roles

HEADS, KEYS, VALUES, LATENT, WIDTH = 4, 6, 8, 5, 16


class Absorbed(nn.Module):
    """Attention whose keys and values stay latent: halves of a weight meet queries and what attention returns."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.queries, self.latent = nn.Linear(WIDTH, HEADS * KEYS), nn.Linear(WIDTH, LATENT)
        self.expand = nn.Linear(LATENT, HEADS * (KEYS + VALUES), bias=False)
        self.out, self.head = nn.Linear(HEADS * VALUES, WIDTH), nn.Linear(WIDTH, 50)
        self.shape = shape

    def halves(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the rows of all keys, and of all values, by heads."""
        weight = self.expand.weight.view(*self.shape)
        return weight[:, :KEYS], weight[:, -VALUES:]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return logits."""
        keys, values = self.halves()
        q, latent = self.queries(x).unflatten(-1, (HEADS, KEYS)), self.latent(x)
        scores = torch.einsum("bthc,bsc->bhts", torch.einsum("bthd,hdc->bthc", q, keys), latent)
        mixed = torch.einsum("bhts,bsc->bthc", scores.softmax(-1), latent)
        made = self.out(torch.einsum("bthc,hdc->bthd", mixed, values).flatten(2))
        return torch.as_tensor(self.head(x + made))


class Unflattened(Absorbed):
    """The same by `unflatten` and `split`."""

    def halves(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the rows of all keys, and of all values, by heads."""
        keys, values = self.expand.weight.unflatten(0, (HEADS, -1)).split([KEYS, VALUES], dim=1)
        return keys, values


@pytest.mark.parametrize(
    "model",
    [Absorbed((HEADS, KEYS + VALUES, LATENT)), Absorbed((HEADS, -1, LATENT)), Unflattened(())],
    ids=["view", "view of the rest", "unflatten"],
)
def test_rows_that_are_cut_in_every_head_are_parts(model: Absorbed) -> None:
    """All keys make one matrix and all values another, wherever their rows lie."""
    assert model(torch.randn(2, 3, WIDTH)).shape == (2, 3, 50)
    decision = infer_roles(model)["expand.weight"]
    assert (decision.role, decision.uncertain) == (Role.MATRIX, False), decision.reason
    assert decision.view is not None
    assert decision.view.split_sizes == (KEYS, VALUES)
    shapes = sorted(tuple(part.shape) for part in decision.view.matrices(model.expand.weight.detach()))
    assert shapes == sorted([(HEADS * KEYS, LATENT), (HEADS * VALUES, LATENT)])


class Folded(Absorbed):
    """Takes rows of some heads only: no view has them."""

    def halves(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return rows of the first two heads, twice."""
        weight = self.expand.weight.view(HEADS, KEYS + VALUES, LATENT)[:2].repeat(2, 1, 1)
        return weight[:, :KEYS], weight[:, -VALUES:]


def test_rows_of_some_heads_are_no_parts() -> None:
    """Where heads were picked before, the rest says nothing of the whole weight."""
    model = Folded(())
    assert model(torch.randn(2, 3, WIDTH)).shape == (2, 3, 50)
    view = infer_roles(model)["expand.weight"].view
    assert view is None or not view.split_sizes
