"""Layers that hold several matrices: a forward shows which; without one, their views are in doubt, and no others'.

Every layer stands in a repeated block beside another one that takes as many features as it gives, by chance, as the
up-projection of a feed-forward network does.
"""

from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import nn

from megaopt_core.params import Doubt, MatrixView, Role
from megaopt_core.routing import infer_roles


class Gated(nn.Module):
    """One half of what `up` makes gates the other; `down` takes that."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * inner), nn.Linear(inner, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, value = self.up(x).chunk(2, -1)
        return self.down(F.silu(gate) * value)


class GatedConvolution(nn.Module):
    """The same with convolutions, the depthwise one of which passes on what it is given."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.up = nn.Conv1d(width, 2 * inner, 1)
        self.mix = nn.Conv1d(2 * inner, 2 * inner, 3, padding=1, groups=2 * inner)
        self.down = nn.Conv1d(inner, width, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.glu(self.mix(self.up(x.mT)), 1)).mT


class GatedSquare(nn.Module):
    """A linear layer as wide as what it takes, whose halves gate two streams; a norm follows."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.up, self.norm = nn.Linear(2 * width, 2 * width), nn.LayerNorm(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        one, other = self.up(torch.cat([x, x.tanh()], -1)).sigmoid().chunk(2, -1)
        return self.norm(one * x + other * x.tanh())


class Modulated(nn.Module):
    """A norm whose scales and shifts a layer makes of a condition."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.up, self.norm = nn.Linear(inner, 2 * width), nn.LayerNorm(width, elementwise_affine=False)
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale, shift = self.up(x.mean(-1, keepdim=True).repeat(1, 1, self.inner)).chunk(2, -1)
        return self.norm(x) * (1 + scale) + shift


class Attended(nn.Module):
    """Query, key and value of one layer, by a name that says nothing."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 3 * inner), nn.Linear(inner, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.up(x).chunk(3, -1)
        return self.down((q @ k.mT).softmax(-1) @ v)


class Block(nn.Module):
    """A part that holds several matrices, and a layer that takes as many features as its first layer gives."""

    def __init__(self, part: nn.Module, width: int) -> None:
        super().__init__()
        rows = part.up.weight.shape[0]
        self.part, self.wide, self.narrow = part, nn.Linear(width, rows), nn.Linear(rows, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.part(x)
        return x + self.narrow(self.wide(x).relu())


class Model(nn.Module):
    """Two such blocks between an embedding and a head."""

    def __init__(self, part: Any, width: int, inner: int) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(50, width), nn.Linear(width, 50)
        self.blocks = nn.ModuleList(Block(part(width, inner), width) for _ in range(2))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


PARTS = [Gated, GatedConvolution, GatedSquare, Modulated, Attended]


@pytest.mark.parametrize(("width", "inner"), [(12, 20), (16, 10), (24, 24), (30, 17)])
@pytest.mark.parametrize("part", PARTS)
def test_the_views_that_a_forward_would_split_are_in_doubt(part, width, inner):
    """Those of all other matrices are certain without a batch, too."""
    model = Model(part, width, inner)
    seen = infer_roles(model, example=torch.zeros(2, 6, dtype=torch.long))
    split = {name for name, said in seen.items() if said.view is not None and said.view.split_sizes}
    guessed = infer_roles(model)
    assert split == {f"blocks.{index}.part.up.weight" for index in range(2)}
    assert {name for name, said in guessed.items() if said.doubt is Doubt.LAYOUT} == split
    matrices = {name for name, said in seen.items() if said.role is Role.MATRIX}
    assert {name for name, said in guessed.items() if said.role is Role.MATRIX} == matrices


class Bottleneck(nn.Module):
    """The first block of a stage: both of its ends give twice as many features as it takes."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.shortcut = nn.Conv2d(width, 2 * width, 1)
        self.reduce = nn.Conv2d(width, width // 2, 1)
        self.mix = nn.Conv2d(width // 2, width // 2, 3, padding=1)
        self.widen = nn.Conv2d(width // 2, 2 * width, 1)


class Grouped(nn.Module):
    """Attention with fewer keys and values than queries, under low-rank factors."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(width, n) for n in (width, width // 2, width // 2))
        self.o = nn.Linear(width, width)
        self.factor = nn.Sequential(nn.Linear(width, width // 8), nn.Linear(width // 8, width // 2))


class Downsampled(nn.Module):
    """A norm, and a convolution that halves the sides and doubles the features."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.mix = nn.GroupNorm(1, width), nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.down = nn.Conv2d(width, 2 * width, 2, stride=2)


@pytest.mark.parametrize("block", [Bottleneck, Grouped, Downsampled])
def test_layers_that_only_change_the_width_are_certain(block):
    """Nothing beside them takes a part of what they make by itself."""
    model = nn.Sequential(nn.ModuleList(block(48) for _ in range(2)))
    matrices = {name: said for name, said in infer_roles(model).items() if said.role is Role.MATRIX}
    assert len(matrices) >= 2
    assert not any(said.uncertain for said in matrices.values())
    assert {said.view for said in matrices.values()} == {MatrixView()}
