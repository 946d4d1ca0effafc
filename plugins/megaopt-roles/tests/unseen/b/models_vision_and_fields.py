"""Vision: transformers, detection, diffusion, quantization, capsules, latents."""

import torch
import torch.nn.functional as F
from einops import rearrange, repeat
from torch import nn

from parts_vision import *


# --- 21: DiT: six-fold modulation, conditioning by class and time


def modulate(x, shift, scale):
    return x * (1 + scale[:, None]) + shift[:, None]


class DiTBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1 = nn.LayerNorm(D, elementwise_affine=False)
        self.norm2 = nn.LayerNorm(D, elementwise_affine=False)
        self.attn = nn.MultiheadAttention(D, 4, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(D, 2 * D), nn.GELU("tanh"), nn.Linear(2 * D, D))
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(D, 6 * D))

    def forward(self, x, c):
        s1, g1, a1, s2, g2, a2 = self.adaLN_modulation(c).chunk(6, 1)
        h = modulate(self.norm1(x), s1, g1)
        x = x + a1[:, None] * self.attn(h, h, h, need_weights=False)[0]
        return x + a2[:, None] * self.mlp(modulate(self.norm2(x), s2, g2))


class MiniDiT(nn.Module):
    def __init__(self, classes=5, p=4):
        super().__init__()
        self.p = p
        self.x_embedder = nn.Linear(3 * p * p, D)
        self.pos_embed = nn.Parameter(torch.randn(1, 16, D) * 0.02)
        self.t_mlp = nn.Sequential(nn.Linear(16, D), nn.SiLU(), nn.Linear(D, D))
        self.y_embedder = nn.Embedding(classes + 1, D)
        self.blocks = nn.ModuleList(DiTBlock() for _ in range(2))
        self.final_mod = nn.Sequential(nn.SiLU(), nn.Linear(D, 2 * D))
        self.final_norm = nn.LayerNorm(D, elementwise_affine=False)
        self.final_linear = nn.Linear(D, 6 * p * p)

    def forward(self, x, t, y):
        freqs = torch.exp(-torch.arange(8, device=x.device) / 2.0)
        ang = t[:, None].float() * freqs
        c = self.t_mlp(torch.cat([ang.cos(), ang.sin()], -1)) + self.y_embedder(y)
        h = self.x_embedder(rearrange(x, "b c (h p) (w q) -> b (h w) (p q c)", p=self.p, q=self.p)) + self.pos_embed
        for block in self.blocks:
            h = block(h, c)
        shift, scale = self.final_mod(c).chunk(2, 1)
        out = self.final_linear(modulate(self.final_norm(h), shift, scale))
        out = rearrange(out, "b (h w) (p q c) -> b c (h p) (w q)", h=4, p=self.p, q=self.p)
        eps, logvar = out.chunk(2, 1)
        return eps, logvar


dit_expected = linears("", "x_embedder", "t_mlp.0", "t_mlp.2") | elementwise("", "pos_embed", "final_mod.1.bias")
dit_expected |= {
    "y_embedder.weight": (EMB, None),
    "final_mod.1.weight": (MAT, split(D, D)),
    "final_linear.weight": (OUT, None),
    "final_linear.bias": (ELE, None),
}
for i in range(2):
    p = f"blocks.{i}."
    dit_expected |= {p + "attn.in_proj_weight": (MAT, split(D, D, D)), p + "adaLN_modulation.1.weight": (MAT, split(*[D] * 6))}
    dit_expected |= elementwise(p, "attn.in_proj_bias", "adaLN_modulation.1.bias")
    dit_expected |= linears(p, "attn.out_proj", "mlp.0", "mlp.2")


# --- 22: VQ-VAE: a bare codebook, straight-through by an autograd.Function


class StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx, z, codes):
        return codes.clone()

    @staticmethod
    def backward(ctx, g):
        return g, g


class Quantizer(nn.Module):
    def __init__(self, n=12, dim=8):
        super().__init__()
        self.codebook = nn.Parameter(torch.randn(n, dim))

    def forward(self, z):
        flat = rearrange(z, "b c h w -> (b h w) c")
        dist = flat.pow(2).sum(1, keepdim=True) - 2 * flat @ self.codebook.t() + self.codebook.pow(2).sum(1)
        idx = dist.argmin(1)
        q = rearrange(self.codebook[idx], "(b h w) c -> b c h w", b=z.shape[0], h=z.shape[2])
        loss = F.mse_loss(q, z.detach()) + 0.25 * F.mse_loss(z, q.detach())
        return StraightThrough.apply(z, q), loss, idx


class ResBlock(nn.Module):
    def __init__(self, c, hidden):
        super().__init__()
        self.body = nn.Sequential(nn.ReLU(), nn.Conv2d(c, hidden, 3, padding=1, bias=False), nn.ReLU(), nn.Conv2d(hidden, c, 1, bias=False))

    def forward(self, x):
        return x + self.body(x)


class VQVAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Conv2d(1, 16, 4, 2, 1), nn.ReLU(), nn.Conv2d(16, 24, 4, 2, 1), ResBlock(24, 8))
        self.pre_quant = nn.Conv2d(24, 8, 1)
        self.vq = Quantizer()
        self.decoder = nn.Sequential(
            nn.Conv2d(8, 24, 3, padding=1), ResBlock(24, 8), nn.ReLU(), nn.ConvTranspose2d(24, 16, 4, 2, 1), nn.ReLU(), nn.ConvTranspose2d(16, 1, 4, 2, 1)
        )

    def forward(self, x):
        z, loss, _ = self.vq(self.pre_quant(self.encoder(x)))
        return torch.sigmoid(self.decoder(z)), loss


vqvae_expected = linears("", "encoder.0", "encoder.2", "pre_quant", "decoder.0")
vqvae_expected |= matrices("", "encoder.3.body.1.weight", "encoder.3.body.3.weight")
vqvae_expected |= matrices("", "decoder.1.body.1.weight", "decoder.1.body.3.weight")
vqvae_expected |= elementwise("", "decoder.3.bias", "decoder.5.bias") | {
    "vq.codebook": (EMB, None, "arguable"),  # indexed by codes; also contracted for distances
    "decoder.3.weight": (MAT, dict(transposed=True), "arguable"),  # [in, out, k, k]; a convolution may stay unturned
    "decoder.5.weight": (OUT, None),
}


# --- 23: capsules with routing by agreement


def squash(s):
    n = s.pow(2).sum(-1, keepdim=True)
    return n / (1 + n) * s / (n + 1e-8).sqrt()


class CapsNet(nn.Module):
    def __init__(self, caps_in=32, caps_out=5, d_in=4, d_out=6):
        super().__init__()
        self.conv = nn.Conv2d(1, 8, 5)
        self.primary = nn.Conv2d(8, 8, 5, 2)
        self.W = nn.Parameter(torch.randn(caps_out, caps_in, d_out, d_in) * 0.1)
        self.bias = nn.Parameter(torch.zeros(caps_out, d_out))
        self.reconstruct = nn.Sequential(nn.Linear(caps_out * d_out, 40), nn.ReLU(), nn.Linear(40, 256), nn.Sigmoid())

    def forward(self, x):
        u = squash(rearrange(self.primary(F.relu(self.conv(x))), "b (g d) h w -> b (g h w) d", d=4))
        u_hat = torch.einsum("oiek,bik->boie", self.W, u)
        logits = torch.zeros(u_hat.shape[:3], device=x.device)
        for step in range(3):
            c = logits.softmax(1)
            v = squash((c[..., None] * (u_hat if step == 2 else u_hat.detach())).sum(2) + self.bias)
            if step < 2:
                logits = logits + (u_hat.detach() * v[:, :, None]).sum(-1)
        length = v.norm(dim=-1)
        mask = F.one_hot(length.argmax(1), v.shape[1]).to(v.dtype)
        return length, self.reconstruct((v * mask[..., None]).flatten(1))


caps_expected = linears("", "conv", "primary", "reconstruct.0") | elementwise("", "bias", "reconstruct.2.bias") | {
    # a batch of votes; or the head, as the lengths of its product leave the model
    "W": (MAT, dict(batched=True, batch_dims=2), "arguable"),
    "reconstruct.2.weight": (OUT, None),
}


# --- 24: Perceiver IO: latents and output queries are bare parameters, weights shared over the depth


class Attend(nn.Module):
    def __init__(self, q_dim, kv_dim, dim=D, heads=4):
        super().__init__()
        self.h = heads
        self.norm, self.norm_context = nn.LayerNorm(q_dim), nn.LayerNorm(kv_dim)
        self.to_q, self.to_kv = nn.Linear(q_dim, dim, bias=False), nn.Linear(kv_dim, 2 * dim, bias=False)
        self.to_out = nn.Linear(dim, q_dim)

    def forward(self, x, context=None):
        x = self.norm(x)
        context = x if context is None else self.norm_context(context)
        q, (k, v) = self.to_q(x), self.to_kv(context).chunk(2, -1)
        q, k, v = (rearrange(t, "b n (h d) -> (b h) n d", h=self.h) for t in (q, k, v))
        a = torch.einsum("b i d, b j d -> b i j", q, k).mul(q.shape[-1] ** -0.5).softmax(-1)
        return self.to_out(rearrange(torch.einsum("b i j, b j d -> b i d", a, v), "(b h) n d -> b n (h d)", h=self.h))


class GEGLU(nn.Module):
    def forward(self, x):
        x, gates = x.chunk(2, dim=-1)
        return x * F.gelu(gates)


class PerceiverIO(nn.Module):
    def __init__(self, channels=10, latents=6, queries=4, depth=3):
        super().__init__()
        self.depth = depth
        self.latents = nn.Parameter(torch.randn(latents, D))
        self.cross = Attend(D, channels)
        self.self_q = nn.Linear(D, D, bias=False)
        self.self_kv = nn.Linear(D, 2 * D, bias=False)
        self.ff = nn.Sequential(nn.LayerNorm(D), nn.Linear(D, 4 * D), GEGLU(), nn.Linear(2 * D, D))
        self.queries = nn.Parameter(torch.randn(queries, 20))
        self.decoder_cross = Attend(20, D)
        self.pool_query = nn.Parameter(torch.randn(1, 20))
        self.to_logits = nn.Linear(20, 3)

    def forward(self, data):
        x = repeat(self.latents, "n d -> b n d", b=data.shape[0])
        x = x + self.cross(x, data)
        for _ in range(self.depth):
            q, (k, v) = self.self_q(x), self.self_kv(x).chunk(2, -1)
            x = x + F.scaled_dot_product_attention(q, k, v)
            x = x + self.ff(x)
        o = repeat(self.queries, "n d -> b n d", b=data.shape[0])
        o = o + self.decoder_cross(o, x)
        pooled = (torch.einsum("qd,bnd->bqn", self.pool_query, o).softmax(-1) @ o).squeeze(1)
        return self.to_logits(pooled)


perceiver_expected = elementwise("", "latents", "queries", "to_logits.bias", "ff.1.bias") | linears("", "ff.3") | norm("ff.0")
perceiver_expected |= {
    "pool_query": (ELE, None, "arguable"),  # a learned query, though a product contracts it
    "self_q.weight": (MAT, None),
    "self_kv.weight": (MAT, split(D, D)),
    "ff.1.weight": (MAT, split(2 * D, 2 * D)),
    "to_logits.weight": (OUT, None),
}
for p in ("cross.", "decoder_cross."):
    perceiver_expected |= norm(p + "norm") | norm(p + "norm_context") | linears(p, "to_out")
    perceiver_expected |= {p + "to_q.weight": (MAT, None), p + "to_kv.weight": (MAT, split(D, D))}


def dit_example():
    return {"x": torch.randn(2, 3, 16, 16), "t": torch.randint(0, 100, (2,)), "y": torch.randint(0, 5, (2,))}


MODELS = [
    ("vit_registers", RegisterViT, lambda: (torch.randn(2, 3, 16, 16),), vit_expected),
    ("swin_bias_table", MiniSwin, lambda: (torch.randn(2, 3, 16, 16),), swin_expected),
    ("detr_deep_supervision", MiniDETR, lambda: (torch.randn(2, 3, 32, 32),), detr_expected),
    ("dit_adaln", MiniDiT, dit_example, dit_expected),
    ("vqvae_codebook", VQVAE, lambda: (torch.rand(2, 1, 16, 16),), vqvae_expected),
    ("capsule_routing", CapsNet, lambda: (torch.rand(2, 1, 16, 16),), caps_expected),
    ("perceiver_io", PerceiverIO, lambda: (torch.randn(2, 15, 10),), perceiver_expected),
]
