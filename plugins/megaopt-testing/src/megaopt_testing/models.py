"""Small models that have one parameter of every kind, for checks that run in milliseconds."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from megaopt_core.params import Fused, MatrixView

__all__ = ["SharedBlocks", "TinyGPT"]

VOCABULARY = 19
CONTEXT = 8


class _Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_attention = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        qkv = MatrixView(
            split_sizes=(width,) * 3, label="qkv", fused=Fused.QKV, head_sizes=(width // heads,) * 3
        )
        self.query_key_value.weight.matrix_view = qkv  # type: ignore[attr-defined] # torch's tensors take any attribute
        self.out = nn.Linear(width, width, bias=False)
        self.norm_mlp = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        batch, length, width = hidden.shape
        query, key, value = self.query_key_value(self.norm_attention(hidden)).split(width, dim=-1)
        split = (batch, length, self.heads, width // self.heads)
        attended = functional.scaled_dot_product_attention(
            query.view(split).transpose(1, 2),
            key.view(split).transpose(1, 2),
            value.view(split).transpose(1, 2),
            is_causal=True,
        )
        hidden = hidden + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        activated: torch.Tensor = self.down(functional.gelu(self.up(self.norm_mlp(hidden))))
        return hidden + activated


class TinyGPT(nn.Module):
    """A GPT of a few thousand parameters: embeddings, positions, norms, biases, matrices of three shapes, a head.

    Args:
        tied: the head is the embedding.
        width: width of the hidden states.
        layers: number of blocks.

    Example:
        >>> model = TinyGPT(tied=True)
        >>> model.head.weight is model.embedding.weight
        True
        >>> model(torch.zeros(1, 4, dtype=torch.long)).shape
        torch.Size([1, 4, 19])
    """

    def __init__(self, *, tied: bool = False, width: int = 16, layers: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Parameter(0.02 * torch.randn(CONTEXT, width))
        self.blocks = nn.ModuleList(_Block(width, 2) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return logits of shape `[batch, length, vocabulary]`.

        Args:
            tokens: token ids of shape `[batch, length]`, int64.
        """
        hidden = self.embedding(tokens) + self.positions[: tokens.shape[1]]
        for block in self.blocks:
            hidden = block(hidden)
        logits: torch.Tensor = self.head(self.norm(hidden))
        return logits


class SharedBlocks(nn.Module):
    """An MLP that applies one hidden layer twice; the layer is registered once, or under two names.

    Args:
        tied: register the hidden layer's weight and bias under a second name too.

    Example:
        >>> model = SharedBlocks(tied=True)
        >>> model.second.weight is model.first.weight
        True
    """

    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.into = nn.Linear(6, 12)
        self.first = nn.Linear(12, 12)
        if tied:
            self.second = nn.Linear(12, 12)
            self.second.weight, self.second.bias = self.first.weight, self.first.bias
        self.out = nn.Linear(12, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return outputs of shape `[batch, 3]`.

        Args:
            inputs: shape `[batch, 6]`.
        """
        hidden = torch.tanh(self.first(torch.tanh(self.into(inputs))))
        second = self.second if hasattr(self, "second") else self.first
        outputs: torch.Tensor = self.out(torch.tanh(second(hidden)))
        return outputs
