"""Language models, written the way their authors write them, and what each parameter is."""

import math
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import nn

from megaopt_core.params import MatrixView, Role

E, O, X = Role.EMBEDDING, Role.OUTPUT, Role.ELEMENTWISE  # noqa: E741 - a table of one-letter roles reads best
M, T = MatrixView(), MatrixView(transposed=True)


def split(*sizes: int, **view: Any) -> MatrixView:
    """Return a split view."""
    return MatrixView(split_sizes=sizes, **view)


class CausalSelfAttention(nn.Module):
    def __init__(self, dim: int = 16, heads: int = 2) -> None:
        super().__init__()
        self.c_attn = nn.Linear(dim, 3 * dim)
        self.c_proj = nn.Linear(dim, dim)
        self.n_head, self.n_embd = heads, dim
        self.flash = hasattr(F, "scaled_dot_product_attention")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, c = x.size()
        q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
        k = k.view(b, t, self.n_head, c // self.n_head).transpose(1, 2)
        q = q.view(b, t, self.n_head, c // self.n_head).transpose(1, 2)
        v = v.view(b, t, self.n_head, c // self.n_head).transpose(1, 2)
        if self.flash:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            y = ((q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))).softmax(-1) @ v
        return self.c_proj(y.transpose(1, 2).contiguous().view(b, t, c))


class FeedForward(nn.Module):
    def __init__(self, dim: int = 16) -> None:
        super().__init__()
        self.c_fc = nn.Linear(dim, 4 * dim)
        self.gelu = nn.GELU()
        self.c_proj = nn.Linear(4 * dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.c_proj(self.gelu(self.c_fc(x)))


class TransformerBlock(nn.Module):
    def __init__(self, dim: int = 16) -> None:
        super().__init__()
        self.ln_1, self.attn = nn.LayerNorm(dim), CausalSelfAttention(dim)
        self.ln_2, self.mlp = nn.LayerNorm(dim), FeedForward(dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class NanoGPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(40, 16),
                "wpe": nn.Embedding(8, 16),
                "h": nn.ModuleList([TransformerBlock()]),
                "ln_f": nn.LayerNorm(16),
            }
        )
        self.lm_head = nn.Linear(16, 40, bias=False)
        self.transformer.wte.weight = self.lm_head.weight

    def forward(
        self, idx: torch.Tensor, targets: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        pos = torch.arange(0, idx.size(1), dtype=torch.long, device=idx.device)
        x = self.transformer.wte(idx) + self.transformer.wpe(pos)
        for block in self.transformer.h:
            x = block(x)
        x = self.transformer.ln_f(x)
        if targets is not None:
            logits = self.lm_head(x)
            return logits, F.cross_entropy(
                logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1
            )
        return self.lm_head(x[:, [-1], :]), None


def norm(x: torch.Tensor) -> torch.Tensor:
    """Return x, normalized without a gain."""
    return F.rms_norm(x, (x.size(-1),))


class CastedLinear(nn.Linear):
    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__(in_features, out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight.type_as(x))


class StackedAttention(nn.Module):
    def __init__(self, dim: int = 16, heads: int = 2, head_dim: int = 8) -> None:
        super().__init__()
        hdim = heads * head_dim
        self.num_heads, self.head_dim, self.hdim = heads, head_dim, hdim
        self.qkvo_w = nn.Parameter(torch.empty(4, hdim, dim))
        self.attn_gate = CastedLinear(12, heads)

    def forward(self, x: torch.Tensor, ve: torch.Tensor, sa_lambdas: torch.Tensor) -> torch.Tensor:
        b, t = x.size(0), x.size(1)
        q, k, v = (
            F.linear(x, self.qkvo_w[:3].flatten(end_dim=1).type_as(x))
            .view(b, t, 3 * self.num_heads, self.head_dim)
            .chunk(3, dim=-2)
        )
        q, k = norm(q), norm(k)
        v = sa_lambdas[0] * v + sa_lambdas[1] * ve.view_as(v) if ve is not None else sa_lambdas[0] * v
        y = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)).transpose(
            1, 2
        )
        y = y * torch.sigmoid(self.attn_gate(x[..., :12])).view(b, t, self.num_heads, 1)
        y = y.contiguous().view(b, t, self.num_heads * self.head_dim)
        return F.linear(y, self.qkvo_w[3].type_as(y))


class SquaredMLP(nn.Module):
    def __init__(self, dim: int = 16) -> None:
        super().__init__()
        self.c_fc = nn.Parameter(torch.empty(4 * dim, dim))
        self.c_proj = nn.Parameter(torch.empty(4 * dim, dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.linear(x, self.c_fc.type_as(x))
        x = F.relu(x).square()
        return F.linear(x, self.c_proj.T.type_as(x))


class SpeedrunGPT(nn.Module):
    def __init__(self, layers: int = 2, dim: int = 16, vocab: int = 40) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.value_embeds = nn.ModuleList([nn.Embedding(vocab, dim) for _ in range(2)])
        self.attns = nn.ModuleList([StackedAttention(dim) for _ in range(layers)])
        self.mlps = nn.ModuleList([SquaredMLP(dim) for _ in range(layers)])
        self.lm_head = CastedLinear(dim, vocab + 24)
        self.scalars = nn.Parameter(torch.ones(5 * layers))
        self.lambdas = nn.Parameter(torch.ones(layers, 2))

    def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        ve = [value_embed(ids) for value_embed in self.value_embeds]
        x = x0 = norm(self.embed(ids)[None])
        skips = []
        skip_weights = self.scalars[: len(self.attns)]
        for i in range(len(self.attns)):
            if i >= 1:
                x = x + skip_weights[i - 1] * skips.pop()
            x = self.lambdas[i, 0] * x + self.lambdas[i, 1] * x0
            x = x + self.attns[i](norm(x), ve[i], self.scalars[-2:])
            x = x + self.mlps[i](norm(x))
            skips.append(x)
        logits = self.lm_head(norm(x)).float()
        logits = 30 * torch.sigmoid(logits / 7.5)
        return F.cross_entropy(logits.view(-1, logits.size(-1)), targets)


class GroupedAttention(nn.Module):
    """The fused q, k, v repeat per group."""

    def __init__(self, dim: int = 16, heads: int = 4, groups: int = 2, size: int = 4) -> None:
        super().__init__()
        self.attn = nn.Linear(dim, (heads + 2 * groups) * size, bias=False)
        self.proj = nn.Linear(heads * size, dim, bias=False)
        self.heads, self.groups, self.size = heads, groups, size

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        b, t, _ = x.size()
        qkv = self.attn(x)
        q_per_kv = self.heads // self.groups
        total_qkv = q_per_kv + 2
        qkv = qkv.view(b, t, self.groups, total_qkv, self.size).permute(0, 2, 3, 1, 4)
        q, k, v = qkv.split((q_per_kv, 1, 1), dim=2)
        q, k, v = (part.reshape(b, -1, t, self.size) for part in (q, k, v))
        q = torch.cat((-q[..., self.size // 2 :], q[..., : self.size // 2]), dim=-1) * sin + q * cos
        y = F.scaled_dot_product_attention(
            q, k.repeat_interleave(q_per_kv, dim=1), v.repeat_interleave(q_per_kv, dim=1)
        )
        return self.proj(y.transpose(1, 2).reshape(b, t, self.heads * self.size))


class LatentAttention(nn.Module):
    """Multi-head latent attention: low-rank queries, a shared compressed cache."""

    def __init__(
        self,
        dim: int = 16,
        heads: int = 2,
        q_rank: int = 6,
        kv_rank: int = 4,
        nope: int = 4,
        rope: int = 2,
        v_dim: int = 4,
    ) -> None:
        super().__init__()
        self.heads, self.kv_rank, self.nope, self.rope, self.v_dim = heads, kv_rank, nope, rope, v_dim
        self.wq_a = nn.Linear(dim, q_rank, bias=False)
        self.q_norm = nn.RMSNorm(q_rank)
        self.wq_b = nn.Linear(q_rank, heads * (nope + rope), bias=False)
        self.wkv_a = nn.Linear(dim, kv_rank + rope, bias=False)
        self.kv_norm = nn.RMSNorm(kv_rank)
        self.wkv_b = nn.Linear(kv_rank, heads * (nope + v_dim), bias=False)
        self.wo = nn.Linear(heads * v_dim, dim, bias=False)

    def forward(self, x: torch.Tensor, freqs: torch.Tensor) -> torch.Tensor:
        b, t, _ = x.size()
        q = self.wq_b(self.q_norm(self.wq_a(x))).view(b, t, self.heads, self.nope + self.rope)
        q_nope, q_pe = torch.split(q, [self.nope, self.rope], dim=-1)
        kv, k_pe = torch.split(self.wkv_a(x), [self.kv_rank, self.rope], dim=-1)
        kv = self.wkv_b(self.kv_norm(kv)).view(b, t, self.heads, self.nope + self.v_dim)
        k_nope, v = torch.split(kv, [self.nope, self.v_dim], dim=-1)
        q = torch.cat([q_nope, q_pe * freqs], dim=-1)
        k = torch.cat([k_nope, (k_pe.unsqueeze(2) * freqs).expand(-1, -1, self.heads, -1)], dim=-1)
        scores = torch.einsum("bshd,bthd->bsht", q, k).softmax(-1)
        return self.wo(torch.einsum("bsht,bthd->bshd", scores, v).flatten(2))


class LatentLM(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(40, 16)
        self.grouped, self.latent = GroupedAttention(), LatentAttention()
        self.norm = nn.RMSNorm(16)
        self.head = nn.Linear(16, 40, bias=False)

    def forward(self, tokens: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        h = self.embed(tokens)
        h = h + self.grouped(h, cos, sin)
        h = h + self.latent(h, cos)
        return self.head(self.norm(h)[:, -1])


class TimeMix(nn.Module):
    """Data-dependent decay with low-rank pieces stored [in, out], and token shift."""

    def __init__(self, c: int = 16, heads: int = 2, rank: int = 4) -> None:
        super().__init__()
        self.head_size, self.n_head = c // heads, heads
        self.x_r = nn.Parameter(torch.empty(1, 1, c))
        self.x_w = nn.Parameter(torch.empty(1, 1, c))
        self.w0 = nn.Parameter(torch.empty(1, 1, c))
        self.w1 = nn.Parameter(torch.zeros(c, rank))
        self.w2 = nn.Parameter(torch.zeros(rank, c))
        self.r_k = nn.Parameter(torch.empty(heads, c // heads))
        self.receptance = nn.Linear(c, c, bias=False)
        self.key = nn.Linear(c, c, bias=False)
        self.value = nn.Linear(c, c, bias=False)
        self.output = nn.Linear(c, c, bias=False)
        self.time_shift = nn.ZeroPad2d((0, 0, 1, -1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, c = x.size()
        xx = self.time_shift(x) - x
        xr, xw = x + xx * self.x_r, x + xx * self.x_w
        r = self.receptance(xr)
        w = -F.softplus(-(self.w0 + torch.tanh(xw @ self.w1) @ self.w2)) - 0.5
        k, v = self.key(x), self.value(x)
        x = torch.cumsum(k * v * w, 1) * r
        x = x + (
            (r.view(b, t, self.n_head, -1) * k.view(b, t, self.n_head, -1) * self.r_k).sum(
                dim=-1, keepdim=True
            )
            * v.view(b, t, self.n_head, -1)
        ).view(b, t, c)
        return self.output(x)


class ScalarLSTM(nn.Module):
    """An sLSTM: block-diagonal recurrent weights by head, run step by step."""

    def __init__(self, dim: int = 16, heads: int = 2) -> None:
        super().__init__()
        self.heads, self.size = heads, dim // heads
        self.gates = nn.Linear(dim, 4 * dim)
        self.recurrent = nn.Parameter(torch.zeros(heads, dim // heads, 4 * (dim // heads)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.zeros_like(x[:, 0])
        c = torch.zeros_like(h)
        outputs = []
        for t in range(x.size(1)):
            rec = torch.einsum("bnd,nde->bne", h.view(-1, self.heads, self.size), self.recurrent)
            i, f, z, o = (self.gates(x[:, t]) + rec.unflatten(-1, (4, -1)).transpose(1, 2).flatten(1)).chunk(
                4, dim=-1
            )
            c = torch.sigmoid(f) * c + torch.exp(i) * torch.tanh(z)
            h = torch.sigmoid(o) * c
            outputs.append(h)
        return torch.stack(outputs, dim=1)


class RecurrentLM(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(40, 16)
        self.ln0 = nn.LayerNorm(16)
        self.mix, self.cell = TimeMix(), ScalarLSTM()
        self.ln_out = nn.LayerNorm(16)
        self.head = nn.Linear(16, 40, bias=False)

    def forward(self, idx: torch.Tensor) -> torch.Tensor:
        x = self.ln0(self.emb(idx))
        x = x + self.mix(x)
        x = x + self.cell(x)
        return self.head(self.ln_out(x))


class SharedEncoder(nn.Module):
    """One layer for all depths, factorized embeddings, a tied decoder with a bias of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.positions, self.types = nn.Embedding(40, 8), nn.Embedding(12, 8), nn.Embedding(2, 8)
        self.expand = nn.Linear(8, 16)
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        self.dense = nn.Linear(16, 8)
        self.norm = nn.LayerNorm(8)
        self.decoder = nn.Linear(8, 40)
        self.decoder.weight = self.words.weight
        self.pooler = nn.Linear(16, 16)
        self.order = nn.Linear(16, 2)

    def forward(self, ids: torch.Tensor, types: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = self.words(ids) + self.positions(torch.arange(ids.size(1))) + self.types(types)
        h = self.expand(h)
        for _ in range(4):
            h = self.layer(h)
        return self.decoder(self.norm(F.gelu(self.dense(h)))), self.order(torch.tanh(self.pooler(h[:, 0])))


EXPECTED = {
    "nanoGPT": (
        NanoGPT,
        {
            "transformer.wte.weight": E,
            "transformer.wpe.weight": E,
            "transformer.h.0.attn.c_attn.weight": split(16, 16, 16),
            "transformer.h.0.attn.c_proj.weight": M,
            "transformer.h.0.mlp.c_fc.weight": M,
            "transformer.h.0.mlp.c_proj.weight": M,
        },
    ),
    "speedrun": (
        SpeedrunGPT,
        {
            "lambdas": X,
            "embed.weight": E,
            **{f"value_embeds.{i}.weight": E for i in range(2)},
            **{f"attns.{i}.qkvo_w": MatrixView(batch_dims=1) for i in range(2)},
            **{f"attns.{i}.attn_gate.weight": M for i in range(2)},
            **{f"mlps.{i}.c_fc": M for i in range(2)},
            **{f"mlps.{i}.c_proj": T for i in range(2)},
            "lm_head.weight": O,
        },
    ),
    "latent and grouped attention": (
        LatentLM,
        {
            "embed.weight": E,
            "grouped.attn.weight": split(8, 4, 4),
            "grouped.proj.weight": M,
            "latent.wq_a.weight": M,
            "latent.wq_b.weight": M,
            "latent.wkv_a.weight": split(4, 2),
            "latent.wkv_b.weight": split(4, 4),
            "latent.wo.weight": M,
            "head.weight": O,
        },
    ),
    "recurrences": (
        RecurrentLM,
        {
            "emb.weight": E,
            "mix.x_r": X,
            "mix.x_w": X,
            "mix.w0": X,
            "mix.w1": T,
            "mix.w2": T,
            "mix.r_k": X,
            **{f"mix.{name}.weight": M for name in ("receptance", "key", "value", "output")},
            "cell.gates.weight": split(16, 16, 16, 16),
            "cell.recurrent": split(8, 8, 8, 8, batch_dims=1, transposed=True),
            "head.weight": O,
        },
    ),
    "one layer for all depths": (
        SharedEncoder,
        {
            "words.weight": E,
            "positions.weight": E,
            "types.weight": E,
            "expand.weight": M,
            "layer.self_attn.in_proj_weight": split(16, 16, 16),
            "layer.self_attn.out_proj.weight": M,
            "layer.linear1.weight": M,
            "layer.linear2.weight": M,
            "dense.weight": M,
            "pooler.weight": M,
            "order.weight": O,
        },
    ),
}
