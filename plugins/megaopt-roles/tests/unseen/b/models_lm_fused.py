"""Decoder language models with fused projections."""

import math

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

EMB, OUT, MAT, ELE = "embedding", "output", "matrix", "elementwise"
V, D, F_ = 97, 32, 48


class RMSNorm(nn.Module):
    def __init__(self, dim, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x):
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)


def rope_tables(n, dim, device):
    inv = 1.0 / (10000 ** (torch.arange(0, dim, 2, device=device).float() / dim))
    ang = torch.arange(n, device=device).float()[:, None] * inv[None]
    ang = torch.cat([ang, ang], -1)
    return ang.cos(), ang.sin()


def rotate_half(x):
    a, b = x.chunk(2, dim=-1)
    return torch.cat([-b, a], -1)


def apply_rope(x, cos, sin):
    return x * cos + rotate_half(x) * sin


# --- 1: InternLM2-like: wqkv is grouped by kv head, w13 is one Linear, checkpointed, a padded vocabulary in the head


class GroupedAttention(nn.Module):
    def __init__(self, dim, heads, kv_heads):
        super().__init__()
        self.kv, self.g, self.hd = kv_heads, heads // kv_heads, dim // heads
        self.wqkv = nn.Linear(dim, (heads + 2 * kv_heads) * self.hd, bias=False)
        self.wo = nn.Linear(dim, dim, bias=False)

    def forward(self, x):
        b, s, _ = x.shape
        qkv = self.wqkv(x).view(b, s, self.kv, self.g + 2, self.hd)
        q = qkv[..., : self.g, :].reshape(b, s, self.kv * self.g, self.hd).transpose(1, 2)
        k = qkv[..., -2, :].transpose(1, 2)
        v = qkv[..., -1, :].transpose(1, 2)
        cos, sin = rope_tables(s, self.hd, x.device)
        q, k = apply_rope(q, cos, sin), apply_rope(k, cos, sin)
        k, v = k.repeat_interleave(self.g, 1), v.repeat_interleave(self.g, 1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(y.transpose(1, 2).reshape(b, s, -1))


class GroupedBlock(nn.Module):
    def __init__(self, dim, heads, kv_heads, hidden):
        super().__init__()
        self.attention_norm, self.ffn_norm = RMSNorm(dim), RMSNorm(dim)
        self.attention = GroupedAttention(dim, heads, kv_heads)
        self.w13 = nn.Linear(dim, 2 * hidden, bias=False)
        self.w2 = nn.Linear(hidden, dim, bias=False)

    def forward(self, x):
        x = x + self.attention(self.attention_norm(x))
        gate, up = self.w13(self.ffn_norm(x)).chunk(2, dim=-1)
        return x + self.w2(F.silu(gate) * up)


class InternLike(nn.Module):
    def __init__(self):
        super().__init__()
        self.tok_embeddings = nn.Embedding(V, D)
        self.layers = nn.ModuleList(GroupedBlock(D, 8, 2, F_) for _ in range(2))
        self.norm = RMSNorm(D)
        self.output = nn.Linear(D, 104, bias=False)

    def forward(self, input_ids):
        h = self.tok_embeddings(input_ids)
        for layer in self.layers:
            h = checkpoint(layer, h, use_reentrant=False)
        return self.output(self.norm(h)).float()


intern_expected = {"tok_embeddings.weight": (EMB, None), "norm.weight": (ELE, None), "output.weight": (OUT, None)}
for i in range(2):
    p = f"layers.{i}."
    intern_expected |= {
        p + "attention_norm.weight": (ELE, None),
        p + "ffn_norm.weight": (ELE, None),
        p + "attention.wqkv.weight": (MAT, dict(dim=0, sizes=[16, 4, 4], interleaved=True)),
        p + "attention.wo.weight": (MAT, None),
        p + "w13.weight": (MAT, dict(dim=0, sizes=[F_, F_], interleaved=False)),
        p + "w2.weight": (MAT, None),
    }


# --- 2: DeepSeek-like: latent attention, a router as bare parameter, token dispatch by torch.where


class LatentAttention(nn.Module):
    def __init__(self, dim=D, heads=4, q_rank=12, kv_rank=20, nope=8, rope=4, v_dim=6):
        super().__init__()
        self.h, self.nope, self.rope, self.vd, self.kv_rank = heads, nope, rope, v_dim, kv_rank
        self.q_a_proj = nn.Linear(dim, q_rank, bias=False)
        self.q_a_layernorm = RMSNorm(q_rank)
        self.q_b_proj = nn.Linear(q_rank, heads * (nope + rope), bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(dim, kv_rank + rope, bias=False)
        self.kv_a_layernorm = RMSNorm(kv_rank)
        self.kv_b_proj = nn.Linear(kv_rank, heads * (nope + v_dim), bias=False)
        self.o_proj = nn.Linear(heads * v_dim, dim, bias=False)

    def forward(self, x):
        b, s, _ = x.shape
        q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x))).view(b, s, self.h, -1).transpose(1, 2)
        q_nope, q_pe = q.split([self.nope, self.rope], -1)
        c, k_pe = self.kv_a_proj_with_mqa(x).split([self.kv_rank, self.rope], -1)
        kv = self.kv_b_proj(self.kv_a_layernorm(c)).view(b, s, self.h, -1).transpose(1, 2)
        k_nope, v = kv.split([self.nope, self.vd], -1)
        cos, sin = rope_tables(s, self.rope, x.device)
        q_pe, k_pe = apply_rope(q_pe, cos, sin), apply_rope(k_pe.unsqueeze(1), cos, sin)
        q = torch.cat([q_nope, q_pe], -1)
        k = torch.cat([k_nope, k_pe.expand(-1, self.h, -1, -1)], -1)
        att = (q @ k.transpose(-1, -2)) / math.sqrt(self.nope + self.rope)
        att = att + torch.full((s, s), float("-inf"), device=x.device).triu(1)
        y = att.softmax(-1) @ v
        return self.o_proj(y.transpose(1, 2).flatten(2))


class SwiGLU(nn.Module):
    def __init__(self, dim, hidden):
        super().__init__()
        self.gate_proj = nn.Linear(dim, hidden, bias=False)
        self.up_proj = nn.Linear(dim, hidden, bias=False)
        self.down_proj = nn.Linear(hidden, dim, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Gate(nn.Module):
    def __init__(self, dim, n):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(n, dim) * 0.1)
        self.register_buffer("e_score_correction_bias", torch.zeros(n))

    def forward(self, x):
        scores = F.linear(x, self.weight).sigmoid()
        idx = (scores + self.e_score_correction_bias).topk(2, -1).indices
        return idx, scores.gather(-1, idx)


class MoE(nn.Module):
    def __init__(self, dim, n=4):
        super().__init__()
        self.gate = Gate(dim, n)
        self.experts = nn.ModuleList(SwiGLU(dim, 24) for _ in range(n))
        self.shared_experts = SwiGLU(dim, 24)

    def forward(self, x):
        flat = x.flatten(0, 1)
        idx, w = self.gate(flat)
        y = torch.zeros_like(flat)
        for e, expert in enumerate(self.experts):
            rows, slot = torch.where(idx == e)
            y = y.index_add(0, rows, expert(flat[rows]) * w[rows, slot, None])
        return y.view_as(x) + self.shared_experts(x)


class DeepLayer(nn.Module):
    def __init__(self, moe):
        super().__init__()
        self.self_attn = LatentAttention()
        self.mlp = MoE(D) if moe else SwiGLU(D, F_)
        self.input_layernorm, self.post_attention_layernorm = RMSNorm(D), RMSNorm(D)

    def forward(self, x):
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class DeepLike(nn.Module):
    def __init__(self):
        super().__init__()
        self.model = nn.ModuleDict(
            dict(
                embed_tokens=nn.Embedding(V, D),
                layers=nn.ModuleList([DeepLayer(False), DeepLayer(True)]),
                norm=RMSNorm(D),
            )
        )
        self.lm_head = nn.Linear(D, V, bias=False)

    def forward(self, tokens):
        x = self.model["embed_tokens"](tokens)
        for layer in self.model["layers"]:
            x = layer(x)
        return self.lm_head(self.model["norm"](x))


def swiglu_names(p):
    return {p + n + ".weight": (MAT, None) for n in ("gate_proj", "up_proj", "down_proj")}


deep_expected = {
    "model.embed_tokens.weight": (EMB, None),
    "model.norm.weight": (ELE, None),
    "lm_head.weight": (OUT, None),
}
for i in range(2):
    p = f"model.layers.{i}."
    deep_expected |= {
        p + "input_layernorm.weight": (ELE, None),
        p + "post_attention_layernorm.weight": (ELE, None),
        p + "self_attn.q_a_proj.weight": (MAT, None),
        p + "self_attn.q_a_layernorm.weight": (ELE, None),
        # the parts of one query: a split, or the query as a whole
        p + "self_attn.q_b_proj.weight": (MAT, dict(dim=0, sizes=[8, 4], interleaved=True), "arguable"),
        p + "self_attn.kv_a_proj_with_mqa.weight": (MAT, dict(dim=0, sizes=[20, 4], interleaved=False)),
        p + "self_attn.kv_a_layernorm.weight": (ELE, None),
        p + "self_attn.kv_b_proj.weight": (MAT, dict(dim=0, sizes=[8, 6], interleaved=True)),
        p + "self_attn.o_proj.weight": (MAT, None),
    }
deep_expected |= swiglu_names("model.layers.0.mlp.")
deep_expected |= {"model.layers.1.mlp.gate.weight": (MAT, None)}
deep_expected |= swiglu_names("model.layers.1.mlp.shared_experts.")
for e in range(4):
    deep_expected |= swiglu_names(f"model.layers.1.mlp.experts.{e}.")


# --- 3: PaLM-like: one Linear for q, k, v and the gated feed-forward; a Sequential whose ends are tied


class Residual(nn.Module):
    def __init__(self, fn):
        super().__init__()
        self.fn = fn

    def forward(self, x):
        return self.fn(x) + x


class ParallelBlock(nn.Module):
    def __init__(self, dim, dim_head=8, heads=4, ff_mult=2):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        inner, ff = dim_head * heads, ff_mult * dim
        self.heads, self.scale = heads, dim_head**-0.5
        self.fused_dims = (inner, dim_head, dim_head, ff * 2)
        self.fused_attn_ff_proj = nn.Linear(dim, sum(self.fused_dims), bias=False)
        self.attn_out = nn.Linear(inner, dim, bias=False)
        self.ff_out = nn.Sequential(GatedSiLU(), nn.Linear(ff, dim, bias=False))

    def forward(self, x):
        n = x.shape[1]
        q, k, v, ff = self.fused_attn_ff_proj(self.norm(x)).split(self.fused_dims, dim=-1)
        q = q.unflatten(-1, (self.heads, -1)).transpose(1, 2) * self.scale
        sim = torch.einsum("b h i d, b j d -> b h i j", q, k)
        sim = sim.masked_fill(torch.ones(n, n, dtype=torch.bool, device=x.device).triu(1), -1e9)
        out = torch.einsum("b h i j, b j d -> b h i d", sim.softmax(-1), v)
        return self.attn_out(out.transpose(1, 2).flatten(2)) + self.ff_out(ff)


class GatedSiLU(nn.Module):
    def forward(self, x):
        x, gate = x.chunk(2, dim=-1)
        return F.silu(gate) * x


class PaLM(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Embedding(V, D),
            *[Residual(ParallelBlock(D)) for _ in range(2)],
            nn.LayerNorm(D),
            nn.Linear(D, V, bias=False),
        )
        self.net[-1].weight = self.net[0].weight

    def forward(self, x):
        return self.net(x)


palm_expected = {
    "net.0.weight": (EMB, None, "arguable"),  # tied: embedding, or output
    "net.3.weight": (ELE, None),
    "net.3.bias": (ELE, None),
}
for i in (1, 2):
    p = f"net.{i}.fn."
    palm_expected |= {
        p + "norm.weight": (ELE, None),
        p + "norm.bias": (ELE, None),
        p + "fused_attn_ff_proj.weight": (MAT, dict(dim=0, sizes=[32, 8, 8, 64, 64], interleaved=False)),
        p + "attn_out.weight": (MAT, None),
        p + "ff_out.1.weight": (MAT, None),
    }


# --- 4: NeoX-like: qkv head by head, gate and up row by row, learned ALiBi slopes, table and unembedding bare


class NeoXBlock(nn.Module):
    def __init__(self, heads=4):
        super().__init__()
        self.h = heads
        self.ln1, self.ln2 = nn.LayerNorm(D), nn.LayerNorm(D)
        self.query_key_value = nn.Linear(D, 3 * D)
        self.dense = nn.Linear(D, D)
        self.slopes = nn.Parameter(torch.linspace(0.1, 1, heads))
        self.gated_in = nn.Linear(D, 2 * F_)
        self.gated_out = nn.Linear(F_, D)

    def forward(self, x):
        b, s, _ = x.shape
        q, k, v = self.query_key_value(self.ln1(x)).view(b, s, self.h, -1).transpose(1, 2).chunk(3, -1)
        pos = torch.arange(s, device=x.device)
        bias = (pos[None] - pos[:, None]).float() * self.slopes[:, None, None]
        att = q @ k.mT / math.sqrt(q.shape[-1]) + bias
        att = att.masked_fill(pos[None] > pos[:, None], float("-inf")).softmax(-1)
        x = x + self.dense((att @ v).transpose(1, 2).flatten(2))
        h = self.gated_in(self.ln2(x))
        return x + self.gated_out(F.gelu(h[..., ::2]) * h[..., 1::2])


class NeoXLike(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte = nn.Parameter(torch.randn(V, D) * 0.02)
        self.trunk = nn.Sequential(*[NeoXBlock() for _ in range(2)])
        self.ln_f = nn.LayerNorm(D)
        self.unembed = nn.Parameter(torch.randn(D, V) * 0.02)

    def forward(self, idx, targets=None):
        logits = self.ln_f(self.trunk(self.wte[idx])) @ self.unembed
        if targets is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


neox_expected = {
    "wte": (EMB, None),
    "unembed": (OUT, None),
    "ln_f.weight": (ELE, None),
    "ln_f.bias": (ELE, None),
}
for i in range(2):
    p = f"trunk.{i}."
    for n in ("ln1.weight", "ln1.bias", "ln2.weight", "ln2.bias", "slopes", "query_key_value.bias", "dense.bias"):
        neox_expected[p + n] = (ELE, None)
    neox_expected |= {
        p + "gated_in.bias": (ELE, None),
        p + "gated_out.bias": (ELE, None),
        p + "query_key_value.weight": (MAT, dict(dim=0, sizes=[8, 8, 8], interleaved=True)),
        p + "dense.weight": (MAT, None),
        p + "gated_in.weight": (MAT, dict(dim=0, sizes=[1, 1], interleaved=True)),
        p + "gated_out.weight": (MAT, None),
    }


def ids():
    return torch.randint(0, V, (2, 10))


MODELS = [
    ("internlm_grouped_qkv", InternLike, lambda: (ids(),), intern_expected),
    ("deepseek_mla_moe", DeepLike, lambda: {"tokens": ids()}, deep_expected),
    ("palm_parallel_fused", PaLM, lambda: (ids(),), palm_expected),
    ("neox_interleaved_loss", NeoXLike, lambda: {"idx": ids(), "targets": ids()}, neox_expected),
]
