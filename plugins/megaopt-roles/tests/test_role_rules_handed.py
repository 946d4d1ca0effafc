"""Projections whose output other modules are handed and take apart, or layers without parameters shape."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from megaopt_core.params import Doubt
from megaopt_core.routing import infer_roles

WIDTH = 16


class Layers(nn.Module):
    """As many layers as a block has that is not read on the spot."""

    def __init__(self) -> None:
        super().__init__()
        self.first_norm, self.second_norm = (nn.LayerNorm(WIDTH, elementwise_affine=False) for _ in range(2))
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
        self.table = nn.Parameter(torch.randn(6, WIDTH))

    def scaled(self, x: torch.Tensor, parts: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """Return both layers of a block, each scaled and shifted."""
        a, b, c, d, e, f = parts
        x = x + c * self.mix(self.first_norm(x) * (1 + b) + a)
        return torch.as_tensor(x + f * self.mlp(self.second_norm(x) * (1 + e) + d))


class Tabled(Layers):
    """Adds a table of its own to what it is handed, and takes the sum apart."""

    def forward(self, x: torch.Tensor, y: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        """Return a stream."""
        return self.scaled(x, (self.table[None] + t.reshape(x.shape[0], 6, -1)).chunk(6, dim=1))


class Shaped(Layers):
    """Is handed what its model has shaped."""

    def forward(self, x: torch.Tensor, y: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        """Return a stream."""
        t = self.table + t
        return self.scaled(x, t.chunk(6, dim=1))


class Indexed(Layers):
    """Takes parts by their index."""

    def forward(self, x: torch.Tensor, y: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        """Return a stream."""
        t = self.table + t
        return self.scaled(x, tuple(t[:, i : i + 1] for i in range(6)))


class Diffuser(nn.Module):
    """Makes shifts and scales of all blocks at once."""

    shaped = False

    def __init__(self, block: type[nn.Module], *, by_layer: bool = False) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, WIDTH), nn.Linear(WIDTH, 3)
        self.time = nn.Sequential(nn.Linear(32, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH))
        shaping = [nn.Unflatten(1, (6, WIDTH))] if by_layer else []
        self.parts = nn.Sequential(nn.SiLU(), nn.Linear(WIDTH, 6 * WIDTH), *shaping)
        self.blocks = nn.ModuleList(block() for _ in range(2))

    def forward(self, x: torch.Tensor, t: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Return a velocity."""
        x, parts = self.first(x), self.parts(self.time(t))
        if self.shaped:
            parts = parts.unflatten(1, (6, WIDTH))
        for block in self.blocks:
            x = block(x, y=y, t=parts)
        return torch.as_tensor(self.last(x))


class ShapedDiffuser(Diffuser):
    """Shapes them itself."""

    shaped = True


@pytest.mark.parametrize(
    "model",
    [
        Diffuser(Tabled),
        ShapedDiffuser(Shaped),
        Diffuser(Shaped, by_layer=True),
        ShapedDiffuser(Indexed),
    ],
    ids=["tabled", "shaped", "shaped by a layer", "indexed"],
)
def test_what_blocks_take_apart_splits_the_projection_that_made_it(model: Diffuser) -> None:
    """Six parts, one for each shift, scale and gate."""
    x, t, y = torch.randn(2, 5, 4), torch.randn(2, 32), torch.randn(2, 7, WIDTH)
    assert model(x, t, y).shape == (2, 5, 3)
    found = infer_roles(model)
    view = found["parts.1.weight"].view
    assert view is not None
    assert view.split_sizes == (WIDTH,) * 6
    assert not any(decision.uncertain for decision in found.values())
    others = [decision.view for name, decision in found.items() if name != "parts.1.weight"]
    assert not any(other.split_sizes for other in others if other is not None)


class Reading(Layers):
    """Takes positions of what it is handed apart, and makes keys and values of each."""

    def __init__(self) -> None:
        super().__init__()
        self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
        """Return a stream."""
        text, image = context[:, :4], context[:, 4:]
        for part in (text, image):
            x = x + functional.scaled_dot_product_attention(self.mix(x), self.k(part), self.v(part))
        return torch.as_tensor(x + self.mlp(x))


class Reader(nn.Module):
    """Hands blocks a context."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.context, self.last = nn.Linear(4, WIDTH), nn.Linear(9, WIDTH), nn.Linear(WIDTH, 3)
        self.blocks = nn.ModuleList(Reading() for _ in range(2))

    def forward(self, x: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
        """Return scores."""
        x, context = self.first(x), self.context(context)
        for block in self.blocks:
            x = block(x, context)
        return torch.as_tensor(self.last(x))


def test_positions_that_blocks_take_apart_split_nothing() -> None:
    """A layer that takes all features of each part tells."""
    decision = infer_roles(Reader())["context.weight"]
    assert decision.doubt is Doubt.NONE
    assert decision.view is not None
    assert not decision.view.split_sizes


class Unflattened(nn.Module):
    """A layer gives features a shape of their own."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.table, self.out, self.head = (
            nn.Embedding(50, WIDTH),
            nn.Linear(WIDTH, WIDTH),
            nn.Linear(WIDTH, 50),
        )
        self.fused = nn.Sequential(nn.Linear(WIDTH, shape[0] * WIDTH), nn.Unflatten(-1, shape))


class Attending(Unflattened):
    """Query, key and value."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return logits."""
        q, k, v = self.fused(self.table(ids)).permute(2, 0, 3, 1, 4)
        y = functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return torch.as_tensor(self.head(self.out(y)))


class Gated(Unflattened):
    """A gate and what it lets through."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return logits."""
        gate, value = self.fused(self.table(ids)).unbind(-2)
        return torch.as_tensor(self.head(self.out(gate.sigmoid() * value)))


@pytest.mark.parametrize(
    ("model", "parts"),
    [(Attending((3, 4, WIDTH // 4)), 3), (Gated((2, WIDTH)), 2)],
    ids=["attending", "gated"],
)
def test_a_layer_that_shapes_features_keeps_them_in_sight(model: Unflattened, parts: int) -> None:
    """The parts are those that a reshape would show."""
    view = infer_roles(model)["fused.0.weight"].view
    assert view is not None
    assert view.split_sizes == (WIDTH,) * parts
