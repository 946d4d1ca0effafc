"""A small GPT, written out in full."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional

from megaopt_tools.shape import DEFAULT_SHAPE, Shape
from megaopt_tools.text import VOCABULARY

__all__ = ["DEFAULT_SHAPE", "GPT", "Shape", "build_model", "loss_of"]


class Attention(nn.Module):
    """Causal self-attention with one weight for queries, keys and values, and rotary positions.

    Args:
        shape: sizes of the model.
    """

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.qkv = nn.Linear(shape.width, 3 * shape.width, bias=False)
        self.out = nn.Linear(shape.width, shape.width, bias=False)

    def forward(self, x: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
        """Let every position attend to itself and those before.

        Args:
            x: `[batch, length, width]`.
            rotation: cosines and sines, `[2, length, width of a head]`.

        Returns:
            `[batch, length, width]`.
        """
        query, key, value = self.qkv(x).chunk(3, dim=-1)
        query, key, value = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (query, key, value)
        )
        query, key = _rotate(query, rotation), _rotate(key, rotation)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class FeedForward(nn.Module):
    """SwiGLU with one weight for gate and values.

    Args:
        shape: sizes of the model.
    """

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_up = nn.Linear(shape.width, 2 * shape.expansion, bias=False)
        self.down = nn.Linear(shape.expansion, shape.width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Transform every position by itself.

        Args:
            x: `[batch, length, width]`.
        """
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(functional.silu(gate) * up)  # type: ignore[no-any-return]


class Block(nn.Module):
    """Attention and feed-forward part, each behind a norm and beside the residual stream.

    Args:
        shape: sizes of the model.
    """

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.norm_attention = nn.RMSNorm(shape.width)
        self.attention = Attention(shape)
        self.norm_feed_forward = nn.RMSNorm(shape.width)
        self.feed_forward = FeedForward(shape)

    def forward(self, x: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
        """Add what the two parts find.

        Args:
            x: `[batch, length, width]`.
            rotation: cosines and sines, `[2, length, width of a head]`.
        """
        x = x + self.attention(self.norm_attention(x), rotation)
        return x + self.feed_forward(self.norm_feed_forward(x))  # type: ignore[no-any-return]


class GPT(nn.Module):
    """A decoder over bytes: RMSNorm, rotary positions, SwiGLU, no biases, a head of its own.

    Args:
        shape: its sizes.

    Example:
        >>> model = GPT(Shape(width=32, layers=1, heads=2, expansion=64))
        >>> model(torch.zeros(2, 5, dtype=torch.int64)).shape
        torch.Size([2, 5, 256])
    """

    def __init__(self, shape: Shape = DEFAULT_SHAPE) -> None:
        super().__init__()
        self.head_width = shape.width // shape.heads
        self.embedding = nn.Embedding(VOCABULARY, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.width)
        self.head = nn.Linear(shape.width, VOCABULARY, bias=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weights: every layer keeps the size of what it is given, and the zero head guesses uniformly."""
        nn.init.normal_(self.embedding.weight, std=0.02)
        nn.init.zeros_(self.head.weight)
        for name, param in self.blocks.named_parameters():
            if param.dim() < 2:
                nn.init.ones_(param)
            else:
                into_stream = name.endswith(("out.weight", "down.weight"))
                gain = 1 / math.sqrt(2 * len(self.blocks)) if into_stream else 1.0
                nn.init.normal_(param, std=gain / math.sqrt(param.shape[1]))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the logits of the next byte at every position.

        Args:
            tokens: int64, `[batch, length]`.

        Returns:
            `[batch, length, 256]`.
        """
        rotation = _rotation(tokens.shape[1], self.head_width, tokens.device)
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, rotation)
        return self.head(self.norm(x))  # type: ignore[no-any-return]


def _rotation(length: int, width: int, device: torch.device) -> torch.Tensor:
    frequencies = 10_000.0 ** (-torch.arange(0, width, 2, device=device) / width)
    angles = torch.outer(torch.arange(length, device=device), frequencies).repeat(1, 2)
    return torch.stack([angles.cos(), angles.sin()])


def _rotate(x: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
    """Turn pairs of features by an angle that grows with the position (rotary embedding, arXiv 2104.09864)."""
    first, second = x.chunk(2, dim=-1)
    return x * rotation[0] + torch.cat([-second, first], dim=-1) * rotation[1]


def loss_of(
    model: nn.Module, tokens: torch.Tensor, targets: torch.Tensor, reduction: str = "mean"
) -> torch.Tensor:
    """Return the cross-entropy of a model in nats.

    Args:
        model: a :class:`GPT`, bare or wrapped.
        tokens: int64, `[batch, length]`.
        targets: the bytes that follow, `[batch, length]`.
        reduction: `"mean"` or `"sum"`.
    """
    logits = model(tokens)
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction=reduction)


def build_model(shape: Shape, seed: int) -> GPT:
    """Return a GPT whose weights depend on the seed alone; torch's own random state stays as it was.

    Args:
        shape: its sizes.
        seed: of the weights.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return GPT(shape)
