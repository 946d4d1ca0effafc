"""Language models with unusual routes: mixture of depths, shared blocks, state spaces, LoRA, T5, memory, experts."""

import math

import torch
import torch.nn.functional as F
from einops import einsum, rearrange
from torch import nn
from torch.func import functional_call, stack_module_state, vmap

EMB, OUT, MAT, ELE = "embedding", "output", "matrix", "elementwise"
V, D = 59, 32


def elementwise(prefix, *names):
    return {prefix + n: (ELE, None) for n in names}


def matrices(prefix, *names):
    return {prefix + n: (MAT, None) for n in names}


def norm(prefix):
    return elementwise(prefix, ".weight", ".bias")


# --- 9: mixture of depths with early exits


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(D), nn.LayerNorm(D)
        self.attn = nn.MultiheadAttention(D, 4, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(D, 3 * D), nn.GELU(), nn.Linear(3 * D, D))

    def forward(self, x):
        h = self.n1(x)
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)
        x = x + self.attn(h, h, h, attn_mask=mask, need_weights=False)[0]
        return x + self.mlp(self.n2(x))


class DepthRouted(nn.Module):
    def __init__(self, capacity=4):
        super().__init__()
        self.capacity, self.router, self.block = capacity, nn.Linear(D, 1, bias=False), Block()

    def forward(self, x):
        w = self.router(x).squeeze(-1)
        top, idx = w.topk(self.capacity, dim=1)
        idx, order = idx.sort(1)
        top = top.gather(1, order)
        idx = idx[..., None].expand(-1, -1, x.shape[-1])
        picked = x.gather(1, idx)
        delta = (self.block(picked) - picked) * top.sigmoid()[..., None]
        return x.scatter_add(1, idx, delta)


class DepthExit(nn.Module):
    def __init__(self):
        super().__init__()
        self.tok, self.pos = nn.Embedding(V, D), nn.Embedding(32, D)
        self.blocks = nn.ModuleList([Block(), DepthRouted(), Block(), DepthRouted()])
        self.early = nn.ModuleDict({str(i): nn.Sequential(nn.LayerNorm(D), nn.Linear(D, V)) for i in (1, 3)})

    def forward(self, ids):
        x = self.tok(ids) + self.pos(torch.arange(ids.shape[1], device=ids.device))
        outs = []
        for i, block in enumerate(self.blocks):
            x = block(x)
            if str(i) in self.early:
                outs.append(self.early[str(i)](x))
        return outs


depth_expected = {"tok.weight": (EMB, None), "pos.weight": (EMB, None)}
for i in range(4):
    p = f"blocks.{i}."
    if i % 2:
        depth_expected[p + "router.weight"] = (MAT, None, "arguable")  # one row: a matrix, or too thin for one
        p += "block."
    depth_expected |= norm(p + "n1") | norm(p + "n2")
    depth_expected[p + "attn.in_proj_weight"] = (MAT, dict(dim=0, sizes=[D, D, D], interleaved=False))
    depth_expected |= matrices(p, "attn.out_proj.weight", "mlp.0.weight", "mlp.2.weight")
    depth_expected |= elementwise(p, "attn.in_proj_bias", "attn.out_proj.bias", "mlp.0.bias", "mlp.2.bias")
for i in (1, 3):
    depth_expected |= norm(f"early.{i}.0") | {f"early.{i}.1.weight": (OUT, None), f"early.{i}.1.bias": (ELE, None)}


# --- 10: ALBERT: one block used three times, a factorized table that is tied to a decoder registered before it


class SharedAlbert(nn.Module):
    def __init__(self, e=8):
        super().__init__()
        self.decoder = nn.Linear(e, V)
        self.sop = nn.Linear(D, 2)
        self.word, self.position, self.segment = nn.Embedding(V, e), nn.Embedding(24, e), nn.Embedding(2, e)
        self.word.weight = self.decoder.weight
        self.up = nn.Linear(e, D)
        self.shared = nn.TransformerEncoderLayer(D, 4, 2 * D, batch_first=True, dropout=0.0)
        self.pooler = nn.Linear(D, D)
        self.dense = nn.Linear(D, e)
        self.ln = nn.LayerNorm(e)

    def forward(self, input_ids, segment_ids):
        pos = torch.arange(input_ids.shape[1], device=input_ids.device)
        x = self.up(self.word(input_ids) + self.position(pos) + self.segment(segment_ids))
        for _ in range(3):
            x = self.shared(x)
        mlm = self.decoder(self.ln(F.gelu(self.dense(x))))
        return {"mlm": mlm, "sop": self.sop(torch.tanh(self.pooler(x[:, 0])))}


albert_expected = {
    "decoder.weight": (OUT, None, "arguable"),  # tied: output, or embedding
    "decoder.bias": (ELE, None),
    "sop.weight": (OUT, None),
    "sop.bias": (ELE, None),
    "position.weight": (EMB, None),
    "segment.weight": (EMB, None),
    "shared.self_attn.in_proj_weight": (MAT, dict(dim=0, sizes=[D, D, D], interleaved=False)),
}
albert_expected |= matrices("", "up.weight", "pooler.weight", "dense.weight")
albert_expected |= matrices("shared.", "self_attn.out_proj.weight", "linear1.weight", "linear2.weight")
albert_expected |= elementwise("", "up.bias", "pooler.bias", "dense.bias", "ln.weight", "ln.bias")
albert_expected |= elementwise("shared.", "self_attn.in_proj_bias", "self_attn.out_proj.bias", "linear1.bias")
albert_expected |= elementwise("shared.", "linear2.bias") | norm("shared.norm1") | norm("shared.norm2")


# --- 11: a selective state space model, its scan a Python loop


class Mixer(nn.Module):
    def __init__(self, inner=48, state=6, rank=4):
        super().__init__()
        self.inner, self.state, self.rank = inner, state, rank
        self.norm = nn.RMSNorm(D)
        self.in_proj = nn.Linear(D, 2 * inner, bias=False)
        self.conv1d = nn.Conv1d(inner, inner, 4, groups=inner, padding=3)
        self.x_proj = nn.Linear(inner, rank + 2 * state, bias=False)
        self.dt_proj = nn.Linear(rank, inner)
        self.A_log = nn.Parameter(torch.log(torch.arange(1.0, state + 1)).repeat(inner, 1))
        self.D = nn.Parameter(torch.ones(inner))
        self.out_proj = nn.Linear(inner, D, bias=False)

    def forward(self, hidden):
        n = hidden.shape[1]
        x, z = self.in_proj(self.norm(hidden)).chunk(2, -1)
        x = F.silu(self.conv1d(x.mT)[..., :n].mT)
        dt, b, c = torch.split(self.x_proj(x), [self.rank, self.state, self.state], -1)
        dt = F.softplus(self.dt_proj(dt))
        decay = torch.exp(dt[..., None] * -self.A_log.exp())
        drive = dt[..., None] * b[:, :, None] * x[..., None]
        h, ys = torch.zeros_like(drive[:, 0]), []
        for t in range(n):
            h = decay[:, t] * h + drive[:, t]
            ys.append(torch.einsum("bds,bs->bd", h, c[:, t]))
        y = (torch.stack(ys, 1) + x * self.D) * F.silu(z)
        return hidden + self.out_proj(y)


class TiedMamba(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Module()
        self.backbone.embedding = nn.Embedding(V, D)
        self.backbone.layers = nn.ModuleList(Mixer() for _ in range(2))
        self.backbone.norm_f = nn.RMSNorm(D)
        self.lm_head = nn.Linear(D, V, bias=False)
        self.lm_head.weight = self.backbone.embedding.weight

    def forward(self, input_ids):
        x = self.backbone.embedding(input_ids)
        for layer in self.backbone.layers:
            x = layer(x)
        return self.lm_head(self.backbone.norm_f(x))


mamba_expected = {
    "backbone.embedding.weight": (EMB, None, "arguable"),  # tied: embedding, or output
    "backbone.norm_f.weight": (ELE, None),
}
for i in range(2):
    p = f"backbone.layers.{i}."
    mamba_expected |= elementwise(p, "norm.weight", "conv1d.weight", "conv1d.bias", "dt_proj.bias", "A_log", "D")
    mamba_expected |= matrices(p, "dt_proj.weight", "out_proj.weight") | {
        p + "in_proj.weight": (MAT, dict(dim=0, sizes=[48, 48], interleaved=False)),
        p + "x_proj.weight": (MAT, dict(dim=0, sizes=[4, 6, 6], interleaved=False)),
    }


# --- 12: low-rank factors written by hand, of hidden layers, of the table and of the head


class AdaptedLinear(nn.Module):
    def __init__(self, fan_in, fan_out, r=4, dora=False):
        super().__init__()
        self.base = nn.Linear(fan_in, fan_out, bias=False).requires_grad_(False)
        self.down = nn.Parameter(torch.randn(r, fan_in) / r)
        self.up = nn.Parameter(torch.randn(fan_out, r) * 0.01)
        self.magnitude = nn.Parameter(self.base.weight.norm(dim=1, keepdim=True)) if dora else None

    def forward(self, x):
        if self.magnitude is not None:
            w = self.base.weight + self.up @ self.down
            return F.linear(x, self.magnitude * w / w.norm(dim=1, keepdim=True))
        return self.base(x) + F.linear(F.linear(x, self.down), self.up)


class AdaptedEmbedding(nn.Module):
    def __init__(self, r=4):
        super().__init__()
        self.base = nn.Embedding(V, D).requires_grad_(False)
        self.table = nn.Parameter(torch.randn(V, r) * 0.02)
        self.lift = nn.Parameter(torch.randn(r, D) * 0.02)

    def forward(self, ids):
        return self.base(ids) + self.table[ids] @ self.lift


class AdaptedBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(D)
        self.q, self.v, self.o = AdaptedLinear(D, D), AdaptedLinear(D, D, dora=True), AdaptedLinear(D, D)
        self.k = nn.Linear(D, D).requires_grad_(False)

    def forward(self, x):
        h = self.norm(x)
        q, k, v = (rearrange(m(h), "b n (h d) -> b h n d", h=4) for m in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.o(rearrange(y, "b h n d -> b n (h d)"))


class AdaptedLM(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = AdaptedEmbedding()
        self.layers = nn.Sequential(AdaptedBlock(), AdaptedBlock())
        self.lm_head = AdaptedLinear(D, V)

    def forward(self, ids):
        return self.lm_head(self.layers(self.embed(ids)))


lora_expected = {
    "embed.table": (ELE, None, "arguable"),  # a factor of an embedding: element-wise; it is indexed by ids itself
    "embed.lift": (ELE, None),
    "lm_head.down": (ELE, None),
    "lm_head.up": (ELE, None),
}
for i in range(2):
    p = f"layers.{i}."
    lora_expected |= norm(p + "norm") | {p + "v.magnitude": (ELE, None)}
    lora_expected |= matrices(p, "q.down", "q.up", "v.down", "v.up", "o.down", "o.up")
