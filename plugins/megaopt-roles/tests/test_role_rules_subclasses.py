"""Classes that only make one of torch's modules in another way, and weights that a loop takes apart."""

import torch
from torch import nn
from torch.nn import functional

from megaopt_core.params import Doubt, Role
from megaopt_core.routing import infer_roles

WIDTH = 8


class Layer(nn.TransformerEncoderLayer):
    """The layer of torch with its sizes."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__(width, heads, 2 * width, batch_first=True)


class ByHand(nn.TransformerEncoderLayer):
    """A layer with a part of its own, which torch's forward calls."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__(width, heads, 2 * width, batch_first=True)
        self.gain = nn.Parameter(torch.ones(width, width))

    def _ff_block(self, x: torch.Tensor) -> torch.Tensor:
        return super()._ff_block(x) * self.gain[0]


class Sequence(nn.Module):
    """Scores sequences."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.items, self.layer = nn.Embedding(20, WIDTH), layer
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return scores."""
        return self.head(self.layer(self.items(ids)).mean(1))


def test_a_layer_that_is_only_made_in_another_way_is_as_torchs_own() -> None:
    """Every decision is the same, word for word."""
    plain = nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, batch_first=True)
    found = infer_roles(Sequence(Layer(WIDTH, 2)))
    assert found == infer_roles(Sequence(plain))
    assert all(decision.doubt is Doubt.NONE for decision in found.values())


def test_a_layer_with_a_method_of_its_own_is_read() -> None:
    """What its method does with a parameter counts."""
    assert infer_roles(Sequence(ByHand(WIDTH, 2)))["layer.gain"].role is Role.ELEMENTWISE


class Remembering(nn.Module):
    """Attends to learned keys and values beside those of the input."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = nn.Parameter(torch.randn(2, 5, WIDTH))
        self.qkv, self.out, self.head = (
            nn.Linear(WIDTH, 3 * WIDTH),
            nn.Linear(WIDTH, WIDTH),
            nn.Linear(WIDTH, 2),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return scores."""
        q, k, v = self.qkv(x).chunk(3, -1)
        keys, values = (rows.expand(x.shape[0], -1, -1) for rows in self.memory)
        k, v = torch.cat((keys, k), 1), torch.cat((values, v), 1)
        x = x + self.out(functional.softmax(q @ k.mT, dim=-1) @ v)
        return self.head(x)


def test_every_row_that_a_loop_takes_is_seen() -> None:
    """The parts of a parameter go to as many names."""
    model = Remembering()
    assert model(torch.randn(2, 3, WIDTH)).shape == (2, 3, 2)
    decision = infer_roles(model)["memory"]
    assert decision.role is Role.ELEMENTWISE
    assert "does not use" not in decision.reason
    assert decision.doubt is Doubt.NONE
