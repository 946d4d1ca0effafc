"""Language models with unusual routes: mixture of depths, shared blocks, state spaces, LoRA, T5, memory, experts."""

import math
import torch
import torch.nn.functional as F
from einops import einsum, rearrange
from torch import nn
from torch.func import functional_call, stack_module_state, vmap

from parts_lm_exotic import *


# --- 13: T5: buckets of relative positions, gated feed-forward, the table is the head


class T5Attention(nn.Module):
    def __init__(self, has_bias, causal=False, heads=4):
        super().__init__()
        self.h, self.causal = heads, causal
        self.q, self.k, self.v, self.o = (nn.Linear(D, D, bias=False) for _ in range(4))
        if has_bias:
            self.relative_attention_bias = nn.Embedding(8, heads)

    def bias(self, n, device):
        p = torch.arange(n, device=device)
        bucket = (p[None] - p[:, None]).clamp(-4, 3) + 4
        return self.relative_attention_bias(bucket).permute(2, 0, 1)

    def forward(self, x, kv, bias=None):
        q, k, v = (rearrange(y, "b n (h d) -> b h n d", h=self.h) for y in (self.q(x), self.k(kv), self.v(kv)))
        s = q @ k.mT
        if bias is not None:
            s = s + bias
        if self.causal:
            s = s.masked_fill(torch.ones(s.shape[-2:], dtype=torch.bool, device=s.device).triu(1), -1e9)
        return self.o(rearrange(s.softmax(-1) @ v, "b h n d -> b n (h d)"))


class T5Block(nn.Module):
    def __init__(self, first, decoder):
        super().__init__()
        self.n1, self.n2 = nn.RMSNorm(D), nn.RMSNorm(D)
        self.self_attn = T5Attention(first, causal=decoder)
        if decoder:
            self.n3, self.cross_attn = nn.RMSNorm(D), T5Attention(False)
        self.wi_0, self.wi_1, self.wo = (nn.Linear(a, b, bias=False) for a, b in ((D, 40), (D, 40), (40, D)))

    def forward(self, x, bias, memory=None):
        h = self.n1(x)
        x = x + self.self_attn(h, h, bias)
        if memory is not None:
            x = x + self.cross_attn(self.n3(x), memory)
        h = self.n2(x)
        return x + self.wo(F.gelu(self.wi_0(h)) * self.wi_1(h))


class MiniT5(nn.Module):
    def __init__(self):
        super().__init__()
        self.shared = nn.Embedding(V, D)
        self.encoder = nn.ModuleList(T5Block(i == 0, False) for i in range(2))
        self.decoder = nn.ModuleList(T5Block(i == 0, True) for i in range(2))
        self.enc_norm, self.dec_norm = nn.RMSNorm(D), nn.RMSNorm(D)

    def run(self, blocks, x, memory=None):
        bias = blocks[0].self_attn.bias(x.shape[1], x.device)
        for block in blocks:
            x = block(x, bias, memory)
        return x

    def forward(self, src, tgt):
        memory = self.enc_norm(self.run(self.encoder, self.shared(src)))
        y = self.dec_norm(self.run(self.decoder, self.shared(tgt), memory))
        return F.linear(y * D**-0.5, self.shared.weight)


t5_expected = {"shared.weight": (EMB, None, "arguable")}  # tied: embedding, or output
t5_expected |= elementwise("", "enc_norm.weight", "dec_norm.weight")
for side in ("encoder", "decoder"):
    # a relative-bias table, owned by nn.Embedding
    t5_expected[f"{side}.0.self_attn.relative_attention_bias.weight"] = (EMB, None, "arguable")
    for i in range(2):
        p = f"{side}.{i}."
        for a in ("self_attn", "cross_attn")[: 2 if side == "decoder" else 1]:
            t5_expected |= matrices(p, *(f"{a}.{n}.weight" for n in "qkvo"))
        t5_expected |= elementwise(p, *(f"n{j}.weight" for j in ((1, 2, 3) if side == "decoder" else (1, 2))))
        t5_expected |= matrices(p, "wi_0.weight", "wi_1.weight", "wo.weight")


# --- 14: product-key memory


class ProductKeyMemory(nn.Module):
    def __init__(self, heads=2, n=6, half=8, k=3):
        super().__init__()
        self.h, self.n, self.half, self.k = heads, n, half, k
        self.query = nn.Linear(D, heads * 2 * half)
        self.query_norm = nn.LayerNorm(half)
        self.keys = nn.Parameter(torch.randn(heads, 2, n, half))
        self.values = nn.EmbeddingBag(n * n, D, mode="sum")
        self.swish, self.proj = nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, x):
        b, t, _ = x.shape
        q = self.query_norm(rearrange(self.query(x), "b t (h p d) -> (b t) h p d", h=self.h, p=2))
        s = torch.einsum("nhpd,hpkd->nhpk", q, self.keys)
        top, idx = s.topk(self.k, -1)
        pair = (top[:, :, 0, :, None] + top[:, :, 1, None, :]).flatten(2)
        where = (idx[:, :, 0, :, None] * self.n + idx[:, :, 1, None, :]).flatten(2)
        best, pick = pair.topk(self.k, -1)
        where = where.gather(-1, pick).flatten(1)
        y = self.values(where, per_sample_weights=best.softmax(-1).flatten(1)).view(b, t, -1)
        return self.proj(y * F.silu(self.swish(x)))


class MemoryLM(nn.Module):
    def __init__(self):
        super().__init__()
        self.tok = nn.Embedding(V, D)
        self.pre, self.memory, self.post, self.norm = Block(), ProductKeyMemory(), Block(), nn.LayerNorm(D)
        self.to_logits = nn.Linear(D, V, bias=False)

    def forward(self, x):
        x = self.pre(self.tok(x))
        x = self.post(x + self.memory(x))
        return self.to_logits(self.norm(x))


memory_expected = {"tok.weight": (EMB, None), "to_logits.weight": (OUT, None)} | norm("norm")
for p in ("pre.", "post."):
    memory_expected |= norm(p + "n1") | norm(p + "n2")
    memory_expected[p + "attn.in_proj_weight"] = (MAT, dict(dim=0, sizes=[D, D, D], interleaved=False))
    memory_expected |= matrices(p, "attn.out_proj.weight", "mlp.0.weight", "mlp.2.weight")
    memory_expected |= elementwise(p, "attn.in_proj_bias", "attn.out_proj.bias", "mlp.0.bias", "mlp.2.bias")
memory_expected |= norm("memory.query_norm") | matrices("memory.", "swish.weight", "proj.weight")
memory_expected |= elementwise("memory.", "query.bias", "swish.bias", "proj.bias") | {
    "memory.query.weight": (MAT, None, "arguable"),  # heads and halves as batch: unsplit, or split in halves per head
    "memory.keys": (MAT, dict(batched=True, batch_dims=2), "arguable"),  # contracted, or a table of keys
    "memory.values.weight": (EMB, None),
}


# --- 15: experts as in gpt-oss: [E, in, 2 * ff] row by row, biases [E, n], attention sinks, a router as parameters


class SinkAttention(nn.Module):
    def __init__(self, heads=4):
        super().__init__()
        self.h = heads
        self.qkv = nn.Linear(D, 3 * D)
        self.sinks = nn.Parameter(torch.zeros(heads))
        self.out = nn.Linear(D, D)

    def forward(self, x):
        q, k, v = rearrange(self.qkv(x), "b n (three h d) -> three b h n d", three=3, h=self.h)
        s = q @ k.mT / math.sqrt(q.shape[-1])
        sink = self.sinks[None, :, None, None].expand(s.shape[0], -1, s.shape[2], 1)
        p = torch.cat([s, sink], -1).softmax(-1)[..., :-1]
        return self.out(rearrange(p @ v, "b h n d -> b n (h d)"))


class OssExperts(nn.Module):
    def __init__(self, e=4, f=20, k=2):
        super().__init__()
        self.e, self.k = e, k
        self.router_weight = nn.Parameter(torch.randn(e, D) * 0.1)
        self.router_bias = nn.Parameter(torch.zeros(e))
        self.gate_up_proj = nn.Parameter(torch.randn(e, D, 2 * f) * 0.1)
        self.gate_up_proj_bias = nn.Parameter(torch.zeros(e, 2 * f))
        self.down_proj = nn.Parameter(torch.randn(e, f, D) * 0.1)
        self.down_proj_bias = nn.Parameter(torch.zeros(e, D))

    def forward(self, x):
        flat = x.reshape(-1, D)
        logits = F.linear(flat, self.router_weight, self.router_bias)
        top, idx = logits.topk(self.k, -1)
        w = torch.zeros_like(logits).scatter(1, idx, top.softmax(-1))
        h = flat.unsqueeze(0).repeat(self.e, 1, 1)
        gate_up = torch.bmm(h, self.gate_up_proj) + self.gate_up_proj_bias[:, None]
        gate, up = gate_up[..., ::2].clamp(max=7), gate_up[..., 1::2].clamp(-7, 7)
        y = torch.bmm((up + 1) * gate * torch.sigmoid(1.702 * gate), self.down_proj) + self.down_proj_bias[:, None]
        return (y * w.t()[..., None]).sum(0).view_as(x)


class OssLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.n1, self.n2 = nn.RMSNorm(D), nn.RMSNorm(D)
        self.attn, self.mlp = SinkAttention(), OssExperts()

    def forward(self, x):
        x = x + self.attn(self.n1(x))
        return x + self.mlp(self.n2(x))


class OssLM(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.block = nn.Embedding(V, D), nn.ModuleList(OssLayer() for _ in range(2))
        self.norm, self.unembedding = nn.RMSNorm(D), nn.Linear(D, V, bias=False)

    def forward(self, x):
        x = self.embedding(x)
        for block in self.block:
            x = block(x)
        return self.unembedding(self.norm(x))


oss_expected = {"embedding.weight": (EMB, None), "norm.weight": (ELE, None), "unembedding.weight": (OUT, None)}
for i in range(2):
    p = f"block.{i}."
    oss_expected |= elementwise(p, "n1.weight", "n2.weight", "attn.qkv.bias", "attn.out.bias", "attn.sinks")
    oss_expected |= elementwise(p + "mlp.", "router_bias", "gate_up_proj_bias", "down_proj_bias")
    oss_expected |= matrices(p, "attn.out.weight", "mlp.router_weight") | {
        p + "attn.qkv.weight": (MAT, dict(dim=0, sizes=[D, D, D], interleaved=False)),
        p + "mlp.gate_up_proj": (MAT, dict(dim=0, sizes=[1, 1], interleaved=True, transposed=True, batched=True)),
        p + "mlp.down_proj": (MAT, dict(transposed=True, batched=True)),
    }


# --- 16: expert choice over [E, out, in] stacks, gate and up block by block; two heads (policy and value)


class ChoiceMoE(nn.Module):
    def __init__(self, e=4, f=24, cap=6):
        super().__init__()
        self.cap = cap
        self.gate = nn.Linear(D, e, bias=False)
        self.w13 = nn.Parameter(torch.randn(e, 2 * f, D) * 0.1)
        self.w2 = nn.Parameter(torch.randn(e, D, f) * 0.1)
        self.f = f

    def forward(self, x):
        flat = x.flatten(0, 1)
        score = self.gate(flat).softmax(-1).t()
        g, idx = score.topk(self.cap, -1)
        dispatch = F.one_hot(idx, flat.shape[0]).to(x.dtype)
        xin = einsum(dispatch, flat, "e c n, n d -> e c d")
        h = einsum(xin, self.w13, "e c d, e f d -> e c f")
        h = F.silu(h[..., : self.f]) * h[..., self.f :]
        y = einsum(h, self.w2, "e c f, e d f -> e c d")
        return einsum(dispatch, g, y, "e c n, e c, e c d -> n d").view_as(x)


class ChoiceAgent(nn.Module):
    def __init__(self, actions=6):
        super().__init__()
        self.encode = nn.Linear(11, D)
        self.time = nn.Parameter(torch.randn(1, 20, D) * 0.02)
        self.layers = nn.ModuleList(nn.ModuleList([nn.LayerNorm(D), ChoiceMoE()]) for _ in range(2))
        self.policy, self.value = nn.Linear(D, actions), nn.Linear(D, 1)

    def forward(self, obs):
        x = self.encode(obs) + self.time[:, : obs.shape[1]]
        for norm_, moe in self.layers:
            x = x + moe(norm_(x))
        return self.policy(x), self.value(x).squeeze(-1)


choice_expected = matrices("", "encode.weight") | elementwise("", "encode.bias", "time", "policy.bias", "value.bias")
choice_expected |= {"policy.weight": (OUT, None), "value.weight": (OUT, None)}
for i in range(2):
    p = f"layers.{i}."
    choice_expected |= norm(p + "0") | {
        p + "1.gate.weight": (MAT, None),
        p + "1.w13": (MAT, dict(dim=0, sizes=[24, 24], interleaved=False, batched=True)),
        p + "1.w2": (MAT, dict(batched=True)),
    }


# --- 17: soft mixture of experts, experts are stacked modules called by vmap and functional_call


class SoftMoE(nn.Module):
    def __init__(self, e=3, slots=2):
        super().__init__()
        self.phi = nn.Parameter(torch.randn(D, e, slots) * 0.1)
        self.scale = nn.Parameter(torch.ones(1))
        experts = [nn.Sequential(nn.Linear(D, 2 * D), nn.GELU(), nn.Linear(2 * D, D)) for _ in range(e)]
        stacked, _ = stack_module_state(experts)
        self.keys = list(stacked)
        self.stacked = nn.ParameterDict({k.replace(".", "_"): nn.Parameter(v.detach()) for k, v in stacked.items()})
        object.__setattr__(self, "skeleton", experts[0].to("meta"))

    def forward(self, x):
        logits = torch.einsum("bnd,des->bnes", F.normalize(x, dim=-1), self.scale * F.normalize(self.phi, dim=0))
        dispatch = logits.softmax(1)
        combine = logits.flatten(2).softmax(-1).view_as(logits)
        slots = torch.einsum("bnes,bnd->ebsd", dispatch, x)
        state = {k: self.stacked[k.replace(".", "_")] for k in self.keys}
        y = vmap(lambda p, z: functional_call(self.skeleton, p, (z,)))(state, slots)
        return torch.einsum("bnes,ebsd->bnd", combine, y)


class SoftMoENet(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(V, D)
        self.mix = nn.ModuleList(SoftMoE() for _ in range(2))
        self.cls = nn.Linear(D, 4)

    def forward(self, ids):
        x = self.tokens(ids)
        for m in self.mix:
            x = x + m(x)
        return self.cls(x.mean(1))


soft_expected = {"tokens.weight": (EMB, None), "cls.weight": (OUT, None), "cls.bias": (ELE, None)}
for i in range(2):
    p = f"mix.{i}."
    soft_expected |= elementwise(p, "scale", "stacked.0_bias", "stacked.2_bias") | {
        p + "phi": (MAT, dict(transposed=True), "arguable"),  # a router, or the parameters of slots
        p + "stacked.0_weight": (MAT, dict(batched=True)),
        p + "stacked.2_weight": (MAT, dict(batched=True)),
    }


def ids(n=10):
    return torch.randint(0, V, (2, n))


MODELS = [
    ("mixture_of_depths_exits", DepthExit, lambda: (ids(),), depth_expected),
    ("albert_shared_head_first", SharedAlbert, lambda: (ids(), torch.randint(0, 2, (2, 10))), albert_expected),
    ("mamba_tied", TiedMamba, lambda: (ids(),), mamba_expected),
    ("lora_by_hand", AdaptedLM, lambda: (ids(),), lora_expected),
    ("t5_relative_bias", MiniT5, lambda: {"src": ids(), "tgt": ids(7)}, t5_expected),
    ("product_key_memory", MemoryLM, lambda: (ids(),), memory_expected),
    ("oss_expert_stacks", OssLM, lambda: (ids(),), oss_expected),
    ("expert_choice_agent", ChoiceAgent, lambda: (torch.randn(2, 9, 11),), choice_expected),
    ("soft_moe_vmap", SoftMoENet, lambda: {"ids": ids()}, soft_expected),
]
