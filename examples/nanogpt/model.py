"""A small GPT in the manner of many training scripts: fused attention weight, tied head, learned positions."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - as everyone calls it


class Block(nn.Module):
    """Attention and a feed-forward layer, each after a norm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.ln_1 = nn.LayerNorm(width)
        self.c_attn = nn.Linear(width, 3 * width)
        self.c_proj = nn.Linear(width, width)
        self.ln_2 = nn.LayerNorm(width)
        self.c_fc = nn.Linear(width, 4 * width)
        self.c_out = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return what the block adds up."""
        batch, time, width = x.shape
        q, k, v = (
            part.view(batch, time, self.heads, width // self.heads).transpose(1, 2)
            for part in self.c_attn(self.ln_1(x)).split(width, dim=2)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.c_proj(mixed.transpose(1, 2).reshape(batch, time, width))
        return x + self.c_out(F.gelu(self.c_fc(self.ln_2(x))))


class GPT(nn.Module):
    """A language model over bytes; head and embedding share one weight."""

    def __init__(self, layers: int = 2, width: int = 64, heads: int = 4, context: int = 64) -> None:
        super().__init__()
        self.wte = nn.Embedding(256, width)
        self.wpe = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.ln_f = nn.LayerNorm(width)
        self.lm_head = nn.Linear(width, 256, bias=False)
        self.lm_head.weight = self.wte.weight
        for param in self.parameters():
            if param.dim() == 2:
                nn.init.normal_(param, std=0.02)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross-entropy, in nats a byte."""
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        return F.cross_entropy(logits.view(-1, 256), targets.reshape(-1))
