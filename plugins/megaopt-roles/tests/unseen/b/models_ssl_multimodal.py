"""Two towers, predictors with stopped gradients, weight-normalized prototypes, images inside a language model."""

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

EMB, OUT, MAT, ELE = "embedding", "output", "matrix", "elementwise"
D, V = 24, 47


def elementwise(prefix, *names):
    return {prefix + n: (ELE, None) for n in names}


def matrices(prefix, *names):
    return {prefix + n: (MAT, None) for n in names}


def norm(prefix):
    return elementwise(prefix, ".weight", ".bias")


def linears(prefix, *names):
    return matrices(prefix, *(n + ".weight" for n in names)) | elementwise(prefix, *(n + ".bias" for n in names))


def heads(*names):
    return {n + ".weight": (OUT, None) for n in names} | elementwise("", *(n + ".bias" for n in names))


def split(*sizes, **more):
    return dict(dim=0, sizes=list(sizes), interleaved=False, **more)


class PreNormBlock(nn.Module):
    def __init__(self, dim=D, h=4):
        super().__init__()
        self.h = h
        self.ln_1, self.ln_2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.c_attn, self.c_proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, x, causal=False):
        q, k, v = (rearrange(t, "b n (h d) -> b h n d", h=self.h) for t in self.c_attn(self.ln_1(x)).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
        x = x + self.c_proj(rearrange(y, "b h n d -> b n (h d)"))
        return x + self.mlp(self.ln_2(x))


def block(p, dim=D):
    e = norm(p + "ln_1") | norm(p + "ln_2") | linears(p, "c_proj", "mlp.0", "mlp.2")
    return e | {p + "c_attn.weight": (MAT, split(dim, dim, dim)), p + "c_attn.bias": (ELE, None)}


# --- 25: CLIP: projections as a bare parameter and as a Linear; the loss is outside


class MiniCLIP(nn.Module):
    def __init__(self, joint=16):
        super().__init__()
        self.conv1 = nn.Conv2d(3, D, 4, 4, bias=False)
        self.class_embedding = nn.Parameter(torch.randn(D) * 0.1)
        self.visual_pos = nn.Parameter(torch.randn(17, D) * 0.1)
        self.visual = nn.ModuleList(PreNormBlock() for _ in range(2))
        self.proj = nn.Parameter(torch.randn(D, joint) * D**-0.5)
        self.token_embedding = nn.Embedding(V, D)
        self.positional_embedding = nn.Parameter(torch.randn(8, D) * 0.01)
        self.text = nn.ModuleList(PreNormBlock() for _ in range(2))
        self.ln_final = nn.LayerNorm(D)
        self.text_projection = nn.Linear(D, joint, bias=False)
        self.logit_scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, image, text):
        x = self.conv1(image).flatten(2).mT
        x = torch.cat([self.class_embedding.expand(len(x), 1, -1), x], 1) + self.visual_pos
        for b in self.visual:
            x = b(x)
        img = F.normalize(x[:, 0] @ self.proj, dim=-1)
        t = self.token_embedding(text) + self.positional_embedding
        for b in self.text:
            t = b(t, causal=True)
        t = self.ln_final(t)[torch.arange(len(t), device=t.device), text.argmax(-1)]
        txt = F.normalize(self.text_projection(t), dim=-1)
        return self.logit_scale.exp() * img @ txt.t()


clip_expected = matrices("", "conv1.weight") | norm("ln_final") | {
    "token_embedding.weight": (EMB, None),
    "proj": (OUT, None),
    "text_projection.weight": (OUT, None),
}
clip_expected |= elementwise("", "class_embedding", "visual_pos", "positional_embedding", "logit_scale")
for i in range(2):
    clip_expected |= block(f"visual.{i}.") | block(f"text.{i}.")


# --- 26: JEPA: a frozen teacher inside the model, a narrow predictor with mask tokens


class MiniJEPA(nn.Module):
    def __init__(self, narrow=16):
        super().__init__()
        self.embed = nn.Linear(12, D)
        self.register_buffer("pos", torch.randn(10, D) * 0.1)
        self.context_encoder = nn.Sequential(PreNormBlock(), PreNormBlock())
        self.target_embed = nn.Linear(12, D).requires_grad_(False)
        self.target_encoder = nn.Sequential(PreNormBlock(), PreNormBlock()).requires_grad_(False)
        self.predictor_embed = nn.Linear(D, narrow)
        self.mask_token = nn.Parameter(torch.zeros(1, 1, narrow))
        self.predictor_pos = nn.Parameter(torch.randn(1, 10, narrow) * 0.02)
        self.predictor = nn.ModuleList([PreNormBlock(narrow), PreNormBlock(narrow)])
        self.predictor_norm, self.predictor_proj = nn.LayerNorm(narrow), nn.Linear(narrow, D)

    def forward(self, x, keep=6):
        ctx = self.context_encoder((self.embed(x) + self.pos)[:, :keep])
        with torch.no_grad():
            target = self.target_encoder(self.target_embed(x) + self.pos)[:, keep:]
            target = F.layer_norm(target, target.shape[-1:])
        h = self.predictor_embed(ctx)
        masks = self.mask_token.expand(len(x), x.shape[1] - keep, -1)
        h = torch.cat([h, masks], 1) + self.predictor_pos
        for b in self.predictor:
            h = b(h)
        pred = self.predictor_proj(self.predictor_norm(h[:, keep:]))
        return F.smooth_l1_loss(pred, target)


jepa_expected = linears("", "embed", "predictor_embed") | elementwise("", "mask_token", "predictor_pos")
jepa_expected |= norm("predictor_norm") | heads("predictor_proj")
for i in range(2):
    jepa_expected |= block(f"context_encoder.{i}.") | block(f"predictor.{i}.", 16)


# --- 27: DINO / BYOL: convolutional trunk, projector, predictor, and a weight-normalized last layer


class MiniDINO(nn.Module):
    def __init__(self, prototypes=32):
        super().__init__()
        self.trunk = nn.Sequential(
            nn.Conv2d(3, 16, 3, 2, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 32, 3, 2, 1), nn.ReLU()
        )
        self.projector = nn.Sequential(
            nn.Linear(32, 48, bias=False), nn.BatchNorm1d(48), nn.ReLU(inplace=True), nn.Linear(48, D)
        )
        self.predictor = nn.Sequential(nn.Linear(D, 40), nn.GELU(), nn.Linear(40, D))
        self.last_layer = weight_norm(nn.Linear(D, prototypes, bias=False))

    def forward(self, view_a, view_b):
        z = self.projector(self.trunk(torch.cat([view_a, view_b])).mean((-2, -1)))
        za, zb = z.chunk(2)
        pa, pb = self.predictor(za), self.predictor(zb)
        byol = 2 - F.cosine_similarity(pa, zb.detach()).mean() - F.cosine_similarity(pb, za.detach()).mean()
        return byol, self.last_layer(F.normalize(z, dim=-1)).softmax(-1)


dino_expected = matrices("", "trunk.0.weight", "projector.0.weight") | norm("trunk.1") | norm("projector.1")
dino_expected |= linears("", "trunk.3", "projector.3", "predictor.0") | heads("predictor.2")
dino_expected |= {
    "last_layer.parametrizations.weight.original0": (ELE, None),
    "last_layer.parametrizations.weight.original1": (OUT, None),
}


# --- 28: Flamingo: resampled images, gated cross attention between blocks of a tied language model


class Resampler(nn.Module):
    def __init__(self, n=4):
        super().__init__()
        self.latents = nn.Parameter(torch.randn(n, D) * 0.02)
        self.norm_media, self.norm_latents = nn.LayerNorm(D), nn.LayerNorm(D)
        self.to_q, self.to_kv, self.to_out = nn.Linear(D, D, bias=False), nn.Linear(D, 2 * D, bias=False), nn.Linear(D, D, bias=False)

    def forward(self, media):
        lat = self.latents.expand(len(media), -1, -1)
        m, q = self.norm_media(media), self.norm_latents(lat)
        k, v = self.to_kv(torch.cat([m, q], 1)).chunk(2, -1)
        return lat + self.to_out(F.scaled_dot_product_attention(self.to_q(q), k, v))


class GatedCross(nn.Module):
    def __init__(self):
        super().__init__()
        self.attn = nn.MultiheadAttention(D, 4, kdim=D, vdim=D, batch_first=True)
        self.attn_gate, self.ff_gate = nn.Parameter(torch.full((1,), 0.1)), nn.Parameter(torch.full((1,), 0.1))
        self.ff = nn.Sequential(nn.LayerNorm(D), nn.Linear(D, 2 * D, bias=False), nn.GELU(), nn.Linear(2 * D, D, bias=False))

    def forward(self, x, media):
        x = x + self.attn_gate.tanh() * self.attn(x, media, media, need_weights=False)[0]
        return x + self.ff_gate.tanh() * self.ff(x)


class MiniFlamingo(nn.Module):
    def __init__(self):
        super().__init__()
        self.vision = nn.Sequential(nn.Conv2d(3, D, 4, 4), nn.Flatten(2))
        self.audio_proj = nn.Linear(7, D)
        self.resampler = Resampler()
        self.wte = nn.Embedding(V, D)
        self.h = nn.ModuleList(nn.ModuleDict({"cross": GatedCross(), "lm": PreNormBlock()}) for _ in range(2))
        self.ln_f = nn.LayerNorm(D)

    def forward(self, image, audio, ids):
        media = self.resampler(torch.cat([self.vision(image).mT, self.audio_proj(audio)], 1))
        x = self.wte(ids)
        for layer in self.h:
            x = layer["lm"](layer["cross"](x, media), causal=True)
        return torch.einsum("bnd,vd->bnv", self.ln_f(x), self.wte.weight)


flamingo_expected = linears("", "vision.0", "audio_proj") | norm("ln_f") | {"wte.weight": (EMB, None, "arguable")}  # tied
flamingo_expected |= elementwise("resampler.", "latents") | norm("resampler.norm_media") | norm("resampler.norm_latents")
flamingo_expected |= matrices("resampler.", "to_q.weight", "to_out.weight")
flamingo_expected["resampler.to_kv.weight"] = (MAT, split(D, D))
for i in range(2):
    p = f"h.{i}.cross."
    flamingo_expected |= block(f"h.{i}.lm.") | norm(p + "ff.0") | matrices(p, "ff.1.weight", "ff.3.weight")
    flamingo_expected |= elementwise(p, "attn_gate", "ff_gate", "attn.in_proj_bias") | linears(p, "attn.out_proj")
    flamingo_expected[p + "attn.in_proj_weight"] = (MAT, split(D, D, D))


def clip_example():
    return torch.randn(3, 3, 16, 16), torch.randint(0, V, (3, 8))


def flamingo_example():
    return {"image": torch.randn(2, 3, 8, 8), "audio": torch.randn(2, 5, 7), "ids": torch.randint(0, V, (2, 9))}


MODELS = [
    ("clip_two_tower", MiniCLIP, clip_example, clip_expected),
    ("jepa_predictor_loss", MiniJEPA, lambda: (torch.randn(2, 10, 12),), jepa_expected),
    ("dino_byol_weight_norm", MiniDINO, lambda: (torch.randn(4, 3, 12, 12), torch.randn(4, 3, 12, 12)), dino_expected),
    ("flamingo_tied", MiniFlamingo, flamingo_example, flamingo_expected),
]
