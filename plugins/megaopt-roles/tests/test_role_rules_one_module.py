"""Models that embed and attend in one module: sizes that they read of activations are known, or go by their places."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from megaopt_core.params import Fused
from megaopt_core.routing import infer_roles

WIDTH, HEADS, HEAD, WORDS = 32, 4, 8, 50

Parts = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class Model(nn.Module):
    """A layer of attention behind a table; subclasses say how queries, keys and values are taken apart."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(16, WIDTH)
        self.norm, self.qkv, self.out = (
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, 3 * WIDTH),
            nn.Linear(WIDTH, WIDTH),
        )
        self.head = nn.Linear(WIDTH, WORDS)

    def parts(self, x: torch.Tensor) -> Parts:
        """Return queries, keys and values, by heads."""
        raise NotImplementedError

    def embed(self, words: torch.Tensor) -> torch.Tensor:
        """Return what the layer begins with."""
        x: torch.Tensor = self.words(words) + self.places(torch.arange(words.shape[1], device=words.device))
        return x

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        """Return logits."""
        x = self.embed(words)
        b, n, c = x.shape
        mixed = functional.scaled_dot_product_attention(*self.parts(self.norm(x)))
        logits: torch.Tensor = self.head(x + self.out(mixed.transpose(1, 2).reshape(b, n, c)))
        return logits


class SplitByWidth(Model):
    def parts(self, x: torch.Tensor) -> Parts:
        b, n, c = x.shape
        q, k, v = (y.view(b, n, HEADS, c // HEADS).transpose(1, 2) for y in self.qkv(x).split(c, dim=2))
        return q, k, v


class Unbound(Model):
    def parts(self, x: torch.Tensor) -> Parts:
        b, n, c = x.shape
        q, k, v = self.qkv(x).reshape(b, n, 3, HEADS, c // HEADS).permute(2, 0, 3, 1, 4).unbind(0)
        return q, k, v


class Sliced(Model):
    def parts(self, x: torch.Tensor) -> Parts:
        b, n, c = x.size()
        y = self.qkv(x)
        found = (y[..., :c], y[..., c : 2 * c], y[..., 2 * c :])
        q, k, v = (part.view(b, n, HEADS, -1).transpose(1, 2) for part in found)
        return q, k, v


class HeadByHead(Model):
    def parts(self, x: torch.Tensor) -> Parts:
        b, n, _ = x.shape
        q, k, v = (y.transpose(1, 2) for y in self.qkv(x).view(b, n, HEADS, 3 * HEAD).chunk(3, dim=-1))
        return q, k, v


class RowByRow(Model):
    def parts(self, x: torch.Tensor) -> Parts:
        b, n, _ = x.shape
        q, k, v = (y.transpose(1, 2) for y in self.qkv(x).view(b, n, HEADS, HEAD, 3).unbind(-1))
        return q, k, v


class IndexedByHand(SplitByWidth):
    def embed(self, words: torch.Tensor) -> torch.Tensor:
        return self.words.weight[words] + self.places.weight[: words.shape[1]]


class LookedUpByFunction(SplitByWidth):
    def embed(self, words: torch.Tensor) -> torch.Tensor:
        return functional.embedding(words, self.words.weight)


class FromElsewhere(Unbound):
    """Nothing tells the shape of what a module returns that cannot be read."""

    def __init__(self) -> None:
        super().__init__()
        self.recurrence = nn.LSTM(WIDTH, WIDTH, batch_first=True)

    def embed(self, words: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.recurrence(self.words(words))[0]
        return found


@pytest.mark.parametrize(
    ("model", "sizes", "heads"),
    [
        (SplitByWidth, (WIDTH,) * 3, (HEAD,) * 3),
        (Unbound, (WIDTH,) * 3, (HEAD,) * 3),
        (Sliced, (WIDTH,) * 3, (HEAD,) * 3),
        (HeadByHead, (HEAD,) * 3, (HEAD,) * 3),
        (RowByRow, (1,) * 3, ()),
        (IndexedByHand, (WIDTH,) * 3, (HEAD,) * 3),
        (LookedUpByFunction, (WIDTH,) * 3, (HEAD,) * 3),
        (FromElsewhere, (WIDTH,) * 3, (HEAD,) * 3),
    ],
)
def test_attention_in_the_module_that_embeds_is_taken_apart(
    model: type[Model], sizes: tuple[int, ...], heads: tuple[int, ...]
) -> None:
    """Sizes that the forward reads of an embedded text are known, and unknown ones go by their places."""
    found = infer_roles(model())["qkv.weight"]
    assert found.view is not None
    assert (found.uncertain, found.view.fused) == (False, Fused.QKV)
    assert (found.view.split_sizes, found.view.head_sizes) == (sizes, heads)
