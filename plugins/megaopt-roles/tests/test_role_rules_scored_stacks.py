"""Heads that stand in one stack: a loss of classes tells them from experts."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from megaopt_core.params import Role
from megaopt_core.routing import infer_roles

WIDTH, CLASSES, COUNT = 12, 17, 3


class Stacked(nn.Module):
    """Predicts several codes."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(CLASSES, WIDTH)
        self.hidden = nn.Parameter(torch.randn(COUNT, WIDTH, WIDTH))
        self.heads = nn.Parameter(torch.randn(COUNT, WIDTH, CLASSES))

    def forward(self, codes: torch.Tensor) -> torch.Tensor:
        """Return a loss; codes are `[batch, count]`."""
        x = functional.gelu(torch.einsum("nkd,kde->nke", self.table(codes), self.hidden))
        return self.loss(x, codes)

    def loss(self, x: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
        """Return the loss of all codes."""
        scores = torch.einsum("nkd,kdv->nkv", x, self.heads)
        return functional.cross_entropy(scores.flatten(0, 1), codes.flatten())


class Batched(Stacked):
    """Has a batch of products."""

    def loss(self, x: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
        """Return the loss of all codes."""
        scores = torch.bmm(x.transpose(0, 1), self.heads)
        return functional.nll_loss(scores.log_softmax(-1).reshape(-1, CLASSES), codes.T.reshape(-1))


class OneByOne(Stacked):
    """Adds the losses up."""

    def loss(self, x: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
        """Return the loss of all codes."""
        total = x.new_zeros(())
        for at in range(COUNT):
            total = total + functional.cross_entropy(x[:, at] @ self.heads[at], codes[:, at])
        return total


class Mapped(Stacked):
    """Maps over the heads; returns scores where it is asked for them."""

    def loss(self, x: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
        """Return the loss of all codes, or scores."""
        scores = torch.vmap(torch.matmul, in_dims=(1, 0))(x, self.heads)
        if self.training:
            return functional.cross_entropy(scores.flatten(0, 1), codes.T.flatten())
        return scores.softmax(-1)


@pytest.mark.parametrize("kind", [Stacked, Batched, OneByOne, Mapped])
def test_a_stack_that_a_loss_of_classes_scores_is_a_head(kind: type[Stacked]) -> None:
    """The stack before it is one of hidden matrices."""
    model = kind()
    assert model(torch.zeros(2, COUNT, dtype=torch.long)).shape == ()
    found = infer_roles(model)
    assert (found["heads"].role, found["heads"].uncertain) == (Role.OUTPUT, False), found["heads"]
    assert (found["hidden"].role, found["hidden"].uncertain) == (Role.MATRIX, False), found["hidden"]
