"""Stacks of keys that activations are compared with, of which the best ones are looked up."""

from types import ModuleType

import pytest
import torch
from torch import nn
from torch.nn import functional

from megaopt_core.params import Doubt, Role
from megaopt_core.routing import infer_roles

WIDTH, HEADS, KEYS, HALF, BEST = 16, 2, 10, 8, 4


class Memory(nn.Module):
    """A memory of values, which pairs of keys look up."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.last = nn.Linear(WIDTH, HEADS * 2 * HALF), nn.Linear(WIDTH, 5)
        self.keys = nn.Parameter(torch.randn(HEADS, 2, KEYS, HALF))
        self.values = nn.EmbeddingBag(KEYS * KEYS, WIDTH, mode="sum")

    def scores(self, q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return scores of both halves of each head."""
        scores = torch.einsum("bhpd,hpkd->bhpk", q, self.keys)
        return scores[:, :, 0], scores[:, :, 1]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return scores of classes."""
        first, second = self.scores(self.query(x).view(-1, HEADS, 2, HALF))
        (a, i), (b, j) = first.topk(BEST, -1), second.topk(BEST, -1)
        together, ids = (
            (a[..., None] + b[..., None, :]).flatten(2),
            (i[..., None] * KEYS + j[..., None, :]).flatten(2),
        )
        best, at = together.topk(BEST, -1)
        weights = best.softmax(-1).flatten(1)
        return torch.as_tensor(
            self.last(self.values(ids.gather(-1, at).flatten(1), per_sample_weights=weights))
        )


class HeadByHead(Memory):
    """Compares with one table of keys after the other."""

    def scores(self, q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return scores of both halves of each head."""
        found = [
            torch.stack(
                [functional.linear(q[:, head, half], self.keys[head][half]) for head in range(HEADS)], 1
            )
            for half in range(2)
        ]
        return found[0], found[1]


@pytest.mark.parametrize("model", [Memory(), HeadByHead()], ids=["at once", "head by head"])
def test_keys_that_are_ranked_are_elementwise_with_a_doubt(model: Memory) -> None:
    """The layer that asks is a matrix."""
    assert model(torch.randn(3, WIDTH)).shape == (3, 5)
    found = infer_roles(model)
    assert (found["keys"].role, found["keys"].doubt) == (Role.ELEMENTWISE, Doubt.ROLE)
    assert (found["query.weight"].role, found["query.weight"].doubt) == (Role.MATRIX, Doubt.NONE)


class Routed(nn.Module):
    """A router of which the best experts are taken, and experts in a stack."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Parameter(torch.randn(4, WIDTH))
        self.up, self.down = nn.Parameter(torch.randn(4, WIDTH, 32)), nn.Parameter(torch.randn(4, 32, WIDTH))
        self.last = nn.Linear(WIDTH, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return scores of classes."""
        shares, best = functional.linear(x, self.router).softmax(-1).topk(2, -1)
        y = torch.zeros_like(x)
        for expert in range(4):
            share = (shares * (best == expert)).sum(-1, keepdim=True)
            y = y + share * (functional.gelu(x @ self.up[expert]) @ self.down[expert])
        return torch.as_tensor(self.last(y))


def test_a_router_and_its_experts_are_matrices() -> None:
    """What is ranked is no product of a stack."""
    found = infer_roles(Routed())
    roles = {name: (found[name].role, found[name].doubt) for name in ("router", "up", "down")}
    assert roles == dict.fromkeys(roles, (Role.MATRIX, Doubt.NONE))


@pytest.mark.parametrize("cut", [".view(2, 2, 6, 4).unbind(1)", ".unflatten(0, (2, 2, 6)).unbind(1)"])
def test_keys_that_a_view_stacks(generated_models: ModuleType, cut: str) -> None:
    """Product keys in one matrix are compared by half, and the best ones looked up: no certain matrix."""
    made = (
        "self.e, self.q, self.keys = nn.Embedding(9, 8), nn.Linear(8, 16), nn.Parameter(torch.zeros(24, 4))\n"
        "self.values, self.h = nn.EmbeddingBag(36, 8, mode='sum'), nn.Linear(8, 9)"
    )
    forward = (
        "x = self.e(ids).flatten(0, 1)\na, b = self.q(x).view(-1, 2, 2, 4).unbind(2)\n"
        f"c, d = self.keys{cut}\n"
        "s, i = torch.einsum('bhd,hnd->bhn', a, c).topk(3, -1)\n"
        "t, j = torch.einsum('bhd,hnd->bhn', b, d).topk(3, -1)\n"
        "w, k = (s.unsqueeze(-1) + t.unsqueeze(-2)).flatten(-2).topk(3, -1)\n"
        "at = (i.unsqueeze(-1) * 6 + j.unsqueeze(-2)).flatten(-2).gather(-1, k)\n"
        "return self.h(self.values(at.flatten(1), per_sample_weights=w.softmax(-1).flatten(1)))"
    )
    with torch.device("meta"):
        found = infer_roles(generated_models.model_with_forward(made, "ids", forward)())["keys"]
    assert (found.role, found.doubt) == (Role.ELEMENTWISE, Doubt.ROLE), found.reason


def test_a_bare_router_is_ranked_too(generated_models: ModuleType) -> None:
    """One matrix whose scores are ranked chooses experts: a certain matrix."""
    made = (
        "self.e, self.g, self.h = nn.Embedding(9, 8), nn.Parameter(torch.zeros(4, 8)), nn.Linear(8, 9)\n"
        "self.experts = nn.ModuleList([nn.Linear(8, 8) for _ in range(4)])"
    )
    forward = (
        "x = self.e(ids)\nw, i = F.linear(x, self.g).softmax(-1).topk(2)\ny = torch.zeros_like(x)\n"
        "for at, expert in enumerate(self.experts):\n    m = (i == at).any(-1)\n"
        "    y[m] += expert(x[m]) * w[m][:, :1]\n"
        "return self.h(x + y)"
    )
    with torch.device("meta"):
        found = infer_roles(generated_models.model_with_forward(made, "ids", forward)())["g"]
    assert (found.role, found.doubt) == (Role.MATRIX, Doubt.NONE), found.reason
