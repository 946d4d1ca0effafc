"""Keys and values of a memory that stand in a stack, one table for each head: attention meets them, no features do."""

import pytest
import torch
from torch import nn

from megaopt_core.params import Role
from megaopt_core.routing import infer_roles

WIDTH, HEADS, SLOTS = 16, 2, 5


class Attention(nn.Module):
    """Attends to what it was given and to a memory."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(31, WIDTH), nn.Linear(WIDTH, 31)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.keys, self.values = (nn.Parameter(torch.randn(HEADS, SLOTS, WIDTH // HEADS)) for _ in "kv")

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Return what attention returns."""
        shares = torch.cat([q @ self.keys.mT, q @ k.mT], -1).softmax(-1)
        return shares @ torch.cat([self.values.expand(len(v), -1, -1, -1), v], 2)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return scores."""
        x = self.table(ids)
        parts = self.qkv(x).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in parts)
        x = x + self.out(self.attend(q, k, v).transpose(1, 2).flatten(2))
        return torch.as_tensor(self.head(x))


class InOne(Attention):
    """Has both in one parameter."""

    def __init__(self) -> None:
        super().__init__()
        del self.keys, self.values
        self.memory = nn.Parameter(torch.randn(2, HEADS, SLOTS, WIDTH // HEADS))

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Return what attention returns."""
        keys, values = (part.unsqueeze(0).expand(len(v), -1, -1, -1) for part in self.memory.unbind(0))
        shares = torch.cat([q @ keys.mT, q @ k.mT], -1).softmax(-1)
        return shares @ torch.cat([values, v], 2)


class Alone(Attention):
    """Has nothing but the memory."""

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Return what attention returns."""
        shares = torch.einsum("bhtd,hnd->bhtn", q, self.keys).softmax(-1)
        return v * torch.einsum("bhtn,hnd->bhtd", shares, self.values) + k


class Apart(Attention):
    """Looks the values of the memory up apart from the others."""

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Return what attention returns."""
        shares = torch.softmax(torch.cat([q @ self.keys.transpose(-1, -2), q @ k.mT], -1), -1)
        known, given = shares.split([SLOTS, v.size(2)], -1)
        return known @ self.values + given @ v


@pytest.mark.parametrize("kind", [Attention, InOne, Alone, Apart])
def test_a_memory_of_each_head_is_no_certain_matrix(kind: type[Attention]) -> None:
    """What is projected stays certain."""
    model = kind()
    assert model(torch.zeros(2, 4, dtype=torch.long)).shape == (2, 4, 31)
    found = infer_roles(model)
    memory = [decision for name, decision in found.items() if name in ("keys", "values", "memory")]
    assert memory
    assert all(decision.role is Role.ELEMENTWISE for decision in memory), memory
    for name in ("qkv", "out"):
        decision = found[f"{name}.weight"]
        assert (decision.role, decision.uncertain) == (Role.MATRIX, False), (name, decision)


class Routed(Attention):
    """Mixes what experts make, in shares that a matrix of each head gives."""

    def __init__(self) -> None:
        super().__init__()
        self.keys = nn.Parameter(torch.randn(HEADS, WIDTH // HEADS, 4))
        self.values = nn.Parameter(torch.randn(4, WIDTH // HEADS, WIDTH // HEADS))

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Return the mixture."""
        shares = torch.einsum("bhtd,hde->bhte", q, self.keys).softmax(-1)
        return torch.einsum("bhte,bhted->bhtd", shares, torch.einsum("bhtd,edf->bhtef", v, self.values)) + k


def test_a_router_of_each_head_is_a_matrix() -> None:
    """What its softmax chooses among is made of activations."""
    model = Routed()
    assert model(torch.zeros(2, 4, dtype=torch.long)).shape == (2, 4, 31)
    found = infer_roles(model)
    for name in ("keys", "values"):
        assert (found[name].role, found[name].uncertain) == (Role.MATRIX, False), (name, found[name])
