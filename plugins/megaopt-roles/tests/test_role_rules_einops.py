"""What einops packs, unpacks again, and rearranges, by a function or a layer, keeps its axes."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from megaopt_core.params import Role
from megaopt_core.routing import infer_roles

einops = pytest.importorskip("einops")
WIDTH, POSITIONS = 16, 6


def normalized(weight: torch.Tensor) -> torch.Tensor:
    """Return a weight whose rows have a norm of one, whatever axes they have."""
    flat, sizes = einops.pack([weight], "o *")
    (made,) = einops.unpack(functional.normalize(flat, dim=-1), sizes, "o *")
    return made


class Convolution(nn.Module):
    """A convolution whose kernels are normalized."""

    def __init__(self, size: int, taken: int = WIDTH, made: int = WIDTH) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(made, taken, size, size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the convolved image."""
        return functional.conv2d(x, normalized(self.weight), padding="same")


class Projection(nn.Module):
    """A projection whose rows are normalized."""

    def __init__(self, taken: int, made: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(made, taken))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the product."""
        return functional.linear(x, normalized(self.weight))


class Images(nn.Module):
    """Convolutions, and classes."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, WIDTH, 1)
        self.large, self.small = Convolution(3), Convolution(1)
        self.up, self.down = Projection(WIDTH, 3 * WIDTH), Projection(3 * WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the logits."""
        x = self.small(torch.relu(self.large(torch.relu(self.first(x))))).mean((2, 3))
        return self.head(self.down(torch.relu(self.up(x))))


class Tokens(nn.Module):
    """Tokens of its own before those that it is given, packed with them and taken away again."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, WIDTH)
        self.registers = nn.Parameter(torch.randn(4, WIDTH))
        self.layer = nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, batch_first=True)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 50)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the logits."""
        x = self.embed(ids)
        registers = einops.repeat(self.registers, "n d -> b n d", b=x.shape[0])
        x, sizes = einops.pack([registers, x], "b * d")
        _, x = einops.unpack(self.layer(x), sizes, "b * d")
        return self.head(x + self.down(torch.relu(self.up(x))))


class Attention(nn.Module):
    """Attention whose heads are told by layers that rearrange; it may return its keys and values."""

    def __init__(self, *, fused: bool) -> None:
        super().__init__()
        layers = pytest.importorskip("einops.layers.torch")
        heads = layers.Rearrange("b n (h d) -> b h n d", h=2)
        kinds = layers.Rearrange("b n (k h d) -> k b h n d", k=3, h=2)
        self.embed = nn.Embedding(50, WIDTH)
        self.qkv = nn.Sequential(nn.Linear(WIDTH, 6 * WIDTH), kinds) if fused else None
        self.each = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), heads) for _ in range(3 - 3 * fused)
        )
        self.merge = layers.Rearrange("b h n d -> b n (h d)")
        self.out = nn.Linear(2 * WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 50)

    def forward(self, ids: torch.Tensor, cached: bool = False) -> Any:
        """Return the logits, and the keys and values if they are asked for."""
        x = self.embed(ids)
        q, k, v = self.qkv(x) if self.qkv is not None else (layer(x) for layer in self.each)
        made = (q @ k.transpose(-1, -2)).softmax(-1) @ v
        logits = self.head(self.norm(x + self.out(self.merge(made))))
        return (logits, (k, v)) if cached else logits


@pytest.mark.parametrize("fused", [True, False])
def test_layers_that_rearrange_tell_heads_and_parts(*, fused: bool) -> None:
    """What they shape into heads is no output, returned or not."""
    model = Attention(fused=fused)
    model(torch.zeros(2, POSITIONS, dtype=torch.long))
    found = infer_roles(model)
    assert {name for name, decision in found.items() if decision.uncertain} == set()
    assert found["head.weight"].role is Role.OUTPUT
    view = found["qkv.0.weight" if fused else "each.2.0.weight"].view
    assert view is not None
    assert view.split_sizes == ((2 * WIDTH,) * 3 if fused else ())


def test_weights_that_are_packed_and_unpacked_are_matrices() -> None:
    """Kernels keep all their axes, also those of one."""
    model = Images()
    model(torch.randn(2, 3, 8, 8))
    found = infer_roles(model)
    for name in ("large", "small", "up", "down"):
        decision = found[f"{name}.weight"]
        assert (decision.role, decision.uncertain) == (Role.MATRIX, False)
        assert decision.view is not None
        assert not decision.view.transposed
    assert found["head.weight"].role is Role.OUTPUT


def test_tokens_that_are_packed_with_others_are_no_matrix() -> None:
    """They lie beside activations: no product is theirs."""
    model = Tokens()
    model(torch.zeros(2, POSITIONS, dtype=torch.long))
    found = infer_roles(model)
    assert found["registers"].role is not Role.MATRIX
    assert {name for name, decision in found.items() if decision.uncertain} == set()
    assert found["head.weight"].role is Role.OUTPUT


@pytest.mark.parametrize(
    "call",
    [
        lambda x, w: einops.pack(x, "b *"),
        lambda x, w: einops.unpack(x, w, "b *"),
        lambda x, w: einops.pack([x, w], w),
        lambda x, w: einops.unpack(x, [(2, 3)], "b c"),
        lambda x, w: einops.pack([x], "b * d e f g h"),
    ],
)
def test_a_wrong_pattern_is_no_error_of_the_reader(call: Any) -> None:
    """A forward that would raise is read all the same."""

    class Wrong(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
            self.call = call

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.call(x, self.weight)

    assert set(infer_roles(Wrong())) == {"weight"}
