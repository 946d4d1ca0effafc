import math, os, sys
from collections import OrderedDict
from dataclasses import dataclass
import torch
from torch import nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from unseen_common import *

MODELS = []


def add(name, factory, example, rules):
    MODELS.append((name, factory, example, expect(factory, rules)))


def ids(v, *shape):
    return lambda: (torch.randint(0, v, shape),)


# ---------------------------------------------------------------- nanoGPT, tied, returns (logits, loss)
@dataclass
class GPTConfig:
    block_size: int = 20
    vocab_size: int = 53
    n_layer: int = 2
    n_head: int = 3
    n_embd: int = 24


class CausalSelfAttention(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.c_attn = nn.Linear(c.n_embd, 3 * c.n_embd)
        self.c_proj = nn.Linear(c.n_embd, c.n_embd)
        self.n_head, self.n_embd = c.n_head, c.n_embd

    def forward(self, x):
        B, L, C = x.size()
        q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
        k = k.view(B, L, self.n_head, C // self.n_head).transpose(1, 2)
        q = q.view(B, L, self.n_head, C // self.n_head).transpose(1, 2)
        v = v.view(B, L, self.n_head, C // self.n_head).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).contiguous().view(B, L, C))


class NanoBlock(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.ln_1 = nn.LayerNorm(c.n_embd)
        self.attn = CausalSelfAttention(c)
        self.ln_2 = nn.LayerNorm(c.n_embd)
        self.mlp = nn.ModuleDict(dict(c_fc=nn.Linear(c.n_embd, 4 * c.n_embd), c_proj=nn.Linear(4 * c.n_embd, c.n_embd)))

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp.c_proj(F.gelu(self.mlp.c_fc(self.ln_2(x))))


class NanoGPT(nn.Module):
    def __init__(self, c=GPTConfig()):
        super().__init__()
        self.transformer = nn.ModuleDict(dict(
            wte=nn.Embedding(c.vocab_size, c.n_embd), wpe=nn.Embedding(c.block_size, c.n_embd),
            h=nn.ModuleList([NanoBlock(c) for _ in range(c.n_layer)]), ln_f=nn.LayerNorm(c.n_embd)))
        self.lm_head = nn.Linear(c.n_embd, c.vocab_size, bias=False)
        self.transformer.wte.weight = self.lm_head.weight

    def forward(self, idx, targets=None):
        pos = torch.arange(idx.size(1), device=idx.device)
        x = self.transformer.wte(idx) + self.transformer.wpe(pos)
        for b in self.transformer.h:
            x = b(x)
        x = self.transformer.ln_f(x)
        if targets is not None:
            logits = self.lm_head(x)
            return logits, F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)
        return self.lm_head(x[:, [-1], :]), None


add("nanogpt_tied", NanoGPT, lambda: dict(idx=torch.randint(0, 53, (2, 9)), targets=torch.randint(0, 53, (2, 9))), {
    "transformer.wte.weight": arg(EMB),  # embedding and head at once
    "transformer.wpe.weight": EMB,
    "*.attn.c_attn.weight": mat([24, 24, 24]),
    "*.c_proj.weight": M, "*.c_fc.weight": M,
})


# ---------------------------------------------------------------- Llama: GQA, rotary, separate projections, untied, checkpointed
class RMSNorm(nn.Module):
    def __init__(self, d, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(d))
        self.eps = eps

    def forward(self, x):
        return self.weight * (x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.eps)).type_as(x)


def rope(x, base=10000.0):  # [b, h, t, d]
    t, d = x.shape[-2:]
    inv = 1.0 / base ** (torch.arange(0, d, 2, device=x.device).float() / d)
    f = torch.outer(torch.arange(t, device=x.device).float(), inv)
    cos, sin = torch.cat([f, f], -1).cos(), torch.cat([f, f], -1).sin()
    x1, x2 = x[..., : d // 2], x[..., d // 2:]
    return x * cos + torch.cat((-x2, x1), -1) * sin


class LlamaAttention(nn.Module):
    def __init__(self, d, h, kv, hd):
        super().__init__()
        self.h, self.kv, self.hd = h, kv, hd
        self.q_proj = nn.Linear(d, h * hd, bias=False)
        self.k_proj = nn.Linear(d, kv * hd, bias=False)
        self.v_proj = nn.Linear(d, kv * hd, bias=False)
        self.o_proj = nn.Linear(h * hd, d, bias=False)
        self.q_norm, self.k_norm = RMSNorm(hd), RMSNorm(hd)

    def forward(self, x):
        b, t, _ = x.shape
        q = self.q_norm(self.q_proj(x).view(b, t, self.h, self.hd)).transpose(1, 2)
        k = self.k_norm(self.k_proj(x).view(b, t, self.kv, self.hd)).transpose(1, 2)
        v = self.v_proj(x).view(b, t, self.kv, self.hd).transpose(1, 2)
        q, k = rope(q), rope(k)
        k, v = (z[:, :, None].expand(b, self.kv, self.h // self.kv, t, self.hd).reshape(b, self.h, t, self.hd) for z in (k, v))
        s = q @ k.transpose(-1, -2) / math.sqrt(self.hd)
        s = s + torch.full((t, t), float("-inf"), device=x.device).triu(1)
        return self.o_proj((s.softmax(-1) @ v).transpose(1, 2).reshape(b, t, -1))


class LlamaMLP(nn.Module):
    def __init__(self, d, f):
        super().__init__()
        self.gate_proj = nn.Linear(d, f, bias=False)
        self.up_proj = nn.Linear(d, f, bias=False)
        self.down_proj = nn.Linear(f, d, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class LlamaLayer(nn.Module):
    def __init__(self, d, h, kv, hd, f):
        super().__init__()
        self.self_attn, self.mlp = LlamaAttention(d, h, kv, hd), LlamaMLP(d, f)
        self.input_layernorm, self.post_attention_layernorm = RMSNorm(d), RMSNorm(d)

    def forward(self, x):
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class Llama(nn.Module):
    def __init__(self, v=71, d=32, h=6, kv=2, hd=8, f=44, n=2):
        super().__init__()
        self.embed_tokens = nn.Embedding(v, d)
        self.layers = nn.ModuleList(LlamaLayer(d, h, kv, hd, f) for _ in range(n))
        self.norm = RMSNorm(d)
        self.output = nn.Linear(d, v + 9, bias=False)  # padded

    def forward(self, tokens):
        x = self.embed_tokens(tokens)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.training else layer(x)
        return self.output(self.norm(x)).float()


add("llama_gqa_checkpointed", Llama, ids(71, 2, 7), {"embed_tokens.weight": EMB, "output.weight": OUT, "layers.*_proj.weight": M})


# ---------------------------------------------------------------- MLA (DeepSeek): low-rank q and kv, shared rope key
class MLA(nn.Module):
    def __init__(self, d, h, q_rank=12, kv_rank=14, nope=6, rp=4, vd=5):
        super().__init__()
        self.h, self.nope, self.rp, self.vd, self.kv_rank = h, nope, rp, vd, kv_rank
        self.wq_a = nn.Linear(d, q_rank, bias=False)
        self.q_norm = RMSNorm(q_rank)
        self.wq_b = nn.Linear(q_rank, h * (nope + rp), bias=False)
        self.wkv_a = nn.Linear(d, kv_rank + rp, bias=False)
        self.kv_norm = RMSNorm(kv_rank)
        self.wkv_b = nn.Linear(kv_rank, h * (nope + vd), bias=False)
        self.wo = nn.Linear(h * vd, d, bias=False)

    def forward(self, x):
        b, t, _ = x.shape
        q = self.wq_b(self.q_norm(self.wq_a(x))).view(b, t, self.h, -1).transpose(1, 2)
        q_nope, q_pe = q.split([self.nope, self.rp], dim=-1)
        kv, k_pe = self.wkv_a(x).split([self.kv_rank, self.rp], dim=-1)
        kv = self.wkv_b(self.kv_norm(kv)).view(b, t, self.h, -1).transpose(1, 2)
        k_nope, v = kv.split([self.nope, self.vd], dim=-1)
        k_pe = rope(k_pe[:, None]).expand(-1, self.h, -1, -1)
        q = torch.cat([q_nope, rope(q_pe)], -1)
        k = torch.cat([k_nope, k_pe], -1)
        att = (torch.einsum("bhtd,bhsd->bhts", q, k) / math.sqrt(q.size(-1))).softmax(-1)
        return self.wo(torch.einsum("bhts,bhsd->bthd", att, v).flatten(2))


class MLALayer(nn.Module):
    def __init__(self, d, h):
        super().__init__()
        self.attn, self.attn_norm, self.ffn_norm = MLA(d, h), RMSNorm(d), RMSNorm(d)
        self.w13 = nn.Linear(d, 2 * 27, bias=False)
        self.w2 = nn.Linear(27, d, bias=False)

    def forward(self, x):
        x = x + self.attn(self.attn_norm(x))
        g, u = self.w13(self.ffn_norm(x)).chunk(2, -1)
        return x + self.w2(F.silu(g) * u)


class DeepSeekish(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(61, 20)
        self.layers = nn.ModuleList([MLALayer(20, 3), MLALayer(20, 3)])
        self.norm, self.head = RMSNorm(20), nn.Linear(20, 61, bias=False)

    def forward(self, tokens):
        x = self.embed(tokens)
        for l in self.layers:
            x = l(x)
        return self.head(self.norm(x)[:, -1])


add("mla", DeepSeekish, ids(61, 2, 6), {
    "embed.weight": EMB, "head.weight": OUT,
    "*.wq_a.weight": M, "*.wq_b.weight": mat([6, 4], interleaved=True),
    "*.wkv_a.weight": mat([14, 4]), "*.wkv_b.weight": mat([6, 5], interleaved=True), "*.wo.weight": M,
    "*.w13.weight": mat([27, 27]), "*.w2.weight": M,
})


# ---------------------------------------------------------------- T5-like encoder-decoder, shared table, scaled tied head
class T5Attn(nn.Module):
    def __init__(self, d, h, hd, bias_table=False):
        super().__init__()
        self.h, self.hd = h, hd
        self.q, self.k, self.v = (nn.Linear(d, h * hd, bias=False) for _ in range(3))
        self.o = nn.Linear(h * hd, d, bias=False)
        if bias_table:
            self.relative_attention_bias = nn.Embedding(16, h)

    def forward(self, x, kv=None, bias=None, causal=False):
        kv = x if kv is None else kv
        sh = lambda z: z.unflatten(-1, (self.h, self.hd)).transpose(1, 2)
        s = sh(self.q(x)) @ sh(self.k(kv)).mT
        if hasattr(self, "relative_attention_bias"):
            rel = (torch.arange(kv.size(1))[None] - torch.arange(x.size(1))[:, None]).clamp(-8, 7) + 8
            bias = self.relative_attention_bias(rel.to(x.device)).permute(2, 0, 1)[None]
        if bias is not None:
            s = s + bias
        if causal:
            s = s.masked_fill(torch.ones(s.shape[-2:], dtype=torch.bool, device=s.device).triu(1), -1e9)
        return self.o((s.softmax(-1) @ sh(self.v(kv))).transpose(1, 2).flatten(2)), bias


class T5Layer(nn.Module):
    def __init__(self, d, first, cross):
        super().__init__()
        self.SelfAttention = T5Attn(d, 4, 5, first)
        if cross:
            self.EncDecAttention = T5Attn(d, 4, 5)
            self.n2 = RMSNorm(d)
        self.wi_0, self.wi_1, self.wo = nn.Linear(d, 37, bias=False), nn.Linear(d, 37, bias=False), nn.Linear(37, d, bias=False)
        self.n1, self.n3 = RMSNorm(d), RMSNorm(d)

    def forward(self, x, enc, bias):
        a, bias = self.SelfAttention(self.n1(x), bias=bias, causal=enc is not None)
        x = x + a
        if enc is not None:
            x = x + self.EncDecAttention(self.n2(x), enc)[0]
        h = self.n3(x)
        return x + self.wo(F.gelu(self.wi_0(h)) * self.wi_1(h)), bias


class T5Stack(nn.Module):
    def __init__(self, shared, cross):
        super().__init__()
        self.embed_tokens = shared
        self.block = nn.ModuleList(T5Layer(18, i == 0, cross) for i in range(2))
        self.final_layer_norm = RMSNorm(18)

    def forward(self, i, enc=None):
        x, bias = self.embed_tokens(i), None
        for b in self.block:
            x, bias = b(x, enc, bias)
        return self.final_layer_norm(x)


class T5(nn.Module):
    def __init__(self):
        super().__init__()
        self.shared = nn.Embedding(47, 18)
        self.encoder, self.decoder = T5Stack(self.shared, False), T5Stack(self.shared, True)
        self.lm_head = nn.Linear(18, 47, bias=False)
        self.lm_head.weight = self.shared.weight

    def forward(self, input_ids, labels):
        enc = self.encoder(input_ids)
        dec_in = F.pad(labels[:, :-1], (1, 0))
        logits = self.lm_head(self.decoder(dec_in, enc) * 18 ** -0.5)
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


add("t5_tied", T5, lambda: dict(input_ids=torch.randint(0, 47, (2, 5)), labels=torch.randint(0, 47, (2, 6))), {
    "shared.weight": arg(EMB),
    "*.relative_attention_bias.weight": arg(EMB),  # owned by nn.Embedding, but a relative-bias table
    "*coder.block.*.weight": M,
} | {})
# norms are one-dimensional and a pattern above would catch them: correct these
MODELS[-1][3].update({n: EL for n in MODELS[-1][3] if ".n1." in n or ".n2." in n or ".n3." in n})


# ---------------------------------------------------------------- PaLM: parallel block, one fused projection, multi-query
class ParallelBlock(nn.Module):
    def __init__(self, d, h, hd, f):
        super().__init__()
        self.norm = nn.LayerNorm(d, bias=False)
        self.h, self.hd = h, hd
        self.dims = (h * hd, hd, hd, f, f)
        self.fused_attn_ff_proj = nn.Linear(d, sum(self.dims), bias=False)
        self.attn_out = nn.Linear(h * hd, d, bias=False)
        self.ff_out = nn.Sequential(nn.Identity(), nn.Linear(f, d, bias=False))

    def forward(self, x):
        q, k, v, ff, gate = self.fused_attn_ff_proj(self.norm(x)).split(self.dims, dim=-1)
        q = rope(q.unflatten(-1, (self.h, self.hd)).transpose(1, 2))
        k = rope(k[:, None])[:, 0]
        sim = torch.einsum("bhid,bjd->bhij", q * self.hd ** -0.5, k)
        sim = sim.masked_fill(torch.ones(sim.shape[-2:], dtype=torch.bool, device=x.device).triu(1), -torch.finfo(sim.dtype).max)
        out = torch.einsum("bhij,bjd->bhid", sim.softmax(-1), v).transpose(1, 2).flatten(2)
        return x + self.attn_out(out) + self.ff_out(F.silu(gate) * ff)


def PaLM():
    emb = nn.Embedding(43, 26)
    net = nn.Sequential(emb, *[ParallelBlock(26, 3, 6, 34) for _ in range(2)], nn.LayerNorm(26, bias=False), nn.Linear(26, 43, bias=False))
    net[-1].weight = emb.weight
    return net


add("palm_parallel_sequential", PaLM, ids(43, 2, 5), {
    "0.weight": arg(EMB), "*.fused_attn_ff_proj.weight": mat([18, 6, 6, 34, 34]), "*.attn_out.weight": M, "*.ff_out.1.weight": M})


# ---------------------------------------------------------------- Falcon/NeoX: fused qkv group by group, parallel residual
class GroupedQKV(nn.Module):
    def __init__(self, d=40, groups=2, per=3, hd=8):
        super().__init__()
        self.g, self.per, self.hd = groups, per, hd
        self.query_key_value = nn.Linear(d, groups * (per + 2) * hd)
        self.dense = nn.Linear(groups * per * hd, d)
        self.h_to_4h, self.out_4h = nn.Linear(d, 96), nn.Linear(96, d)
        self.ln = nn.LayerNorm(d)

    def forward(self, x):
        y = self.ln(x)
        b, t, _ = x.shape
        qkv = self.query_key_value(y).view(b, t, self.g, self.per + 2, self.hd)
        q, k, v = qkv[..., :-2, :], qkv[..., [-2], :], qkv[..., [-1], :]
        k, v = torch.broadcast_to(k, q.shape), torch.broadcast_to(v, q.shape)
        q, k, v = (z.flatten(2, 3).transpose(1, 2) for z in (q, k, v))
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, -1)
        return x + self.dense(a) + self.out_4h(F.gelu(self.h_to_4h(y)))


class Falconish(nn.Module):
    def __init__(self):
        super().__init__()
        self.word_embeddings = nn.Embedding(90, 40)
        self.h = nn.ModuleList([GroupedQKV() for _ in range(3)])
        self.ln_f = nn.LayerNorm(40)
        self.lm_head = nn.Linear(40, 90, bias=False)

    def forward(self, input_ids, labels):
        x = self.word_embeddings(input_ids)
        for h in self.h:
            x = h(x)
        return F.cross_entropy(self.lm_head(self.ln_f(x)).flatten(0, 1), labels.flatten())  # loss only


add("falcon_grouped_qkv_loss_only", Falconish, lambda: (torch.randint(0, 90, (2, 6)), torch.randint(0, 90, (2, 6))), {
    "word_embeddings.weight": EMB, "lm_head.weight": OUT,
    "*.query_key_value.weight": mat([24, 8, 8], interleaved=True), "*.dense.weight": M, "*4h*.weight": M})
