"""Axes of positions: a cut along one is no split of features, however many dimensions are guessed."""

from types import ModuleType

import pytest
import torch
from torch import nn
from torch.nn import functional

from megaopt_core.params import Doubt, RoleDecision
from megaopt_core.routing import infer_roles

WIDTH = 24


def rows_of(model: nn.Module, name: str) -> tuple[int, ...]:
    """Return the sizes of the parts of a weight, which nothing is doubtful about."""
    decision: RoleDecision = infer_roles(model)[name]
    assert decision.doubt is Doubt.NONE, decision
    assert decision.view is not None
    return decision.view.split_sizes


class Chunked(nn.Module):
    """Sends a sequence through a feed-forward network in parts, to save memory."""

    def __init__(self, dim: int = 1) -> None:
        super().__init__()
        self.dim, self.chunk = dim, 2
        self.mix, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        self.up, self.down, self.head = nn.Linear(WIDTH, 40), nn.Linear(40, WIDTH), nn.Linear(WIDTH, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return scores."""
        x = self.norm(x + self.mix(x))
        parts = [self.down(functional.gelu(self.up(part))) for part in self.parts(x)]
        return self.head(self.norm(x + torch.cat(parts, self.dim)))

    def parts(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return parts of so many positions."""
        return x.split(2, 1)


class ChunkedBySetting(Chunked):
    """The same by numbers that the module holds."""

    def parts(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return parts of so many positions, or one."""
        return x.split(self.chunk or x.size(1), self.dim)


class Halved(Chunked):
    """The same in two halves."""

    def parts(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return both."""
        return x.chunk(2, self.dim)


class HalvesGated(Chunked):
    """One half of the positions gates the other."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return scores."""
        one, other = self.mix(x).chunk(2, 1)
        return self.head(one * other.sigmoid())


class Matrices(Chunked):
    """Multiplies each part with a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return scores."""
        x = self.mix(x)
        return self.head(torch.cat([functional.gelu(part @ self.weight) for part in x.split(2, 1)], 1))


class FeedForward(nn.Module):
    """A layer whose forward is not read where it is called: it says nowhere how many features it takes."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(WIDTH, 40), nn.GELU(), nn.Linear(40, WIDTH))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x with more."""
        return x + self.inner(self.norm(x))


class ChunkedLayer(Chunked):
    """Calls such a layer on each part."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = FeedForward()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return scores."""
        x = self.norm(x + self.mix(x))
        return self.head(torch.cat([self.layer(part) for part in x.split(2, 1)], 1))


@pytest.mark.parametrize(
    "make",
    [Chunked, ChunkedBySetting, Halved, HalvesGated, Matrices, ChunkedLayer],
    ids=lambda make: make.__name__,
)
def test_a_part_of_a_sequence_is_no_part_of_a_matrix(make: type[Chunked]) -> None:
    """What takes a part takes as many features as the whole has."""
    model = make()
    assert model(torch.randn(2, 8, WIDTH)).shape[-1] == 3
    assert rows_of(model, "mix.weight") == ()


class Gates(nn.Module):
    """A cell, whose input has two dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return scores."""
        one, other = self.inner(x).chunk(2, 1)
        return self.head(one * other.sigmoid())


def test_a_part_that_a_layer_takes_is_one_of_features() -> None:
    """The head takes as many features as one part has."""
    model = Gates()
    assert model(torch.randn(2, WIDTH)).shape == (2, 3)
    assert rows_of(model, "inner.weight") == (WIDTH, WIDTH)


class Modulated(nn.Module):
    """A block that adds a table to what all blocks are modulated with."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.out = nn.Parameter(torch.randn(6, 8)), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        """Return x with more."""
        shift, scale, gate, *_ = (self.table[None] + t.reshape(x.size(0), 6, -1)).chunk(6, dim=1)
        return x + gate * self.out(x * (1 + scale) + shift)


class ModulatedByShape(Modulated):
    """The same by the whole shape."""

    def forward(self, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        """Return x with more."""
        batch, _, _ = x.shape
        shift, scale, gate, *_ = (self.table[None] + t.reshape(batch, 6, -1)).chunk(6, dim=1)
        return x + gate * self.out(x * (1 + scale) + shift)


class Diffusion(nn.Module):
    """Modulates all blocks with one projection of the time."""

    def __init__(self, block: type[Modulated]) -> None:
        super().__init__()
        self.inner, self.time, self.head = nn.Linear(8, 8), nn.Linear(8, 48), nn.Linear(8, 3)
        self.blocks = nn.ModuleList(block() for _ in range(2))

    def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        """Return noise."""
        t, x = self.time(functional.silu(time)), self.inner(x)
        for block in self.blocks:
            x = block(x, t)
        return self.head(x)


@pytest.mark.parametrize("block", [Modulated, ModulatedByShape], ids=lambda block: block.__name__)
def test_what_is_shaped_anew_in_a_block_is_cut_as_there(block: type[Modulated]) -> None:
    """With three dimensions the new shape would lay features and positions in one axis."""
    model = Diffusion(block)
    assert model(torch.randn(2, 5, 8), torch.randn(2, 8)).shape == (2, 5, 3)
    assert rows_of(model, "time.weight") == (8,) * 6


CLASS_TOKENS = {  # how class tokens and the others are taken apart again, and how many there are
    "slices": ("cls, x = z[:, :1], z[:, 1:]", 1),
    "several": ("cls, x = z[:, : self.count], z[:, self.count :]", 2),
    "split": ("cls, x = z.split([1, z.shape[1] - 1], 1)", 1),
    "narrow": ("cls, x = z.narrow(1, 0, 1), z.narrow(1, 1, z.shape[1] - 1)", 1),
    "tensor_split": ("cls, x = z.tensor_split([1], dim=1)", 1),
}


@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("case", CLASS_TOKENS)
def test_tokens_that_lie_beside_others(generated_models: ModuleType, case: str, depth: int) -> None:
    """Tokens laid before the others and taken off again are positions: no layer's features are cut."""
    cut, count = CLASS_TOKENS[case]
    made = (
        f"self.tok, self.h, self.count = nn.Linear(8, 16), nn.Linear(16, 9), {count}\n"
        f"self.cls = nn.Parameter(torch.zeros(1, {count}, 16))\n"
        "self.att, self.mix = nn.MultiheadAttention(16, 2, batch_first=True), nn.Linear(24, 24)\n"
        "mlps = [nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 40), nn.GELU(), nn.Linear(40, 16))"
        f" for _ in range({depth})]\nself.mlps = nn.ModuleList(mlps)"
    )
    methods = (
        "def forward(self, x):\n    x = self.tok(x)\n    cls = self.cls.expand(len(x), -1, -1)\n"
        "    for mlp in self.mlps:\n        x = x + self.mix(x.transpose(1, 2)).transpose(1, 2)\n"
        "        z = torch.cat([cls, x], 1)\n        z = z + self.att(z, z, z)[0]\n        z = z + mlp(z)\n"
        f"        {cut}\n    return self.h(cls.mean(1))"
    )
    model = generated_models.model(made, methods)()
    model(torch.randn(2, 24, 8))
    found = infer_roles(model)
    assert [(name, one.reason) for name, one in found.items() if one.uncertain] == []
    for i in range(depth):
        last = found[f"mlps.{i}.3.weight"]
        assert last.view is not None
        assert last.view.split_sizes == (), last.reason
