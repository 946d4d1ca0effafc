import math, os, sys
import torch
from torch import nn
import torch.nn.functional as F
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from unseen_common import *

MODELS = []


def add(name, factory, example, rules):
    MODELS.append((name, factory, example, expect(factory, rules)))


# ---------------------------------------------------------------- ResNet + FPN-ish heads: class, box, per-pixel mask by conv
class Bottleneck(nn.Module):
    def __init__(self, i, m, o, stride=1):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(i, m, 1, bias=False), nn.BatchNorm2d(m)
        self.conv2, self.bn2 = nn.Conv2d(m, m, 3, stride, 1, bias=False), nn.BatchNorm2d(m)
        self.conv3, self.bn3 = nn.Conv2d(m, o, 1, bias=False), nn.BatchNorm2d(o)
        self.se = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(o, 4, 1), nn.ReLU(), nn.Conv2d(4, o, 1), nn.Sigmoid())
        self.downsample = nn.Sequential(nn.Conv2d(i, o, 1, stride, bias=False), nn.BatchNorm2d(o)) if i != o or stride > 1 else None

    def forward(self, x):
        y = F.relu(self.bn1(self.conv1(x)))
        y = self.bn3(self.conv3(F.relu(self.bn2(self.conv2(y)))))
        return F.relu(y * self.se(y) + (x if self.downsample is None else self.downsample(x)))


class Detector(nn.Module):
    def __init__(self, classes=6):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 10, 7, 2, 3, bias=False), nn.BatchNorm2d(10)
        self.layer1 = nn.Sequential(Bottleneck(10, 6, 20), Bottleneck(20, 6, 20))
        self.layer2 = nn.Sequential(Bottleneck(20, 9, 28, 2), Bottleneck(28, 9, 28))
        self.lateral = nn.ModuleList([nn.Conv2d(20, 16, 1), nn.Conv2d(28, 16, 1)])
        self.cls_tower = nn.Sequential(nn.Conv2d(16, 16, 3, 1, 1), nn.GroupNorm(4, 16), nn.ReLU())
        self.cls_logits, self.bbox_pred = nn.Conv2d(16, classes, 3, 1, 1), nn.Conv2d(16, 4, 3, 1, 1)
        self.scales = nn.ParameterList([nn.Parameter(torch.tensor(1.0)) for _ in range(2)])
        self.mask = nn.Sequential(nn.ConvTranspose2d(16, 12, 2, 2), nn.ReLU(), nn.ConvTranspose2d(12, 1, 2, 2))

    def forward(self, x):
        c1 = self.layer1(F.relu(self.bn1(self.conv1(x))))
        c2 = self.layer2(c1)
        p2 = self.lateral[1](c2)
        p1 = self.lateral[0](c1) + F.interpolate(p2, scale_factor=2)
        cls = [self.cls_logits(self.cls_tower(p)) for p in (p1, p2)]
        box = [(self.bbox_pred(p) * s).exp() for p, s in zip((p1, p2), self.scales)]
        return cls, box, self.mask(p1)


add("resnet_detector", Detector, lambda: (torch.randn(2, 3, 32, 32),), {
    "conv1.weight": M, "layer?.*conv?.weight": M, "layer?.*.se.?.weight": M, "layer?.*.downsample.0.weight": M, "lateral.*.weight": M,
    "cls_tower.0.weight": M, "cls_logits.weight": OUT, "bbox_pred.weight": OUT, "mask.0.weight": arg(mat(transposed=True)), "mask.2.weight": OUT})


# ---------------------------------------------------------------- ConvNeXt / MobileNet features, hierarchical labels
class CNBlock(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.dwconv, self.norm = nn.Conv2d(d, d, 7, padding=3, groups=d), nn.LayerNorm(d)
        self.pwconv1, self.pwconv2 = nn.Linear(d, 3 * d), nn.Linear(3 * d, d)
        self.grn_gamma, self.grn_beta = nn.Parameter(torch.zeros(1, 1, 1, 3 * d)), nn.Parameter(torch.zeros(1, 1, 1, 3 * d))
        self.gamma = nn.Parameter(1e-2 * torch.ones(d, 1, 1))

    def forward(self, x):
        y = F.gelu(self.pwconv1(self.norm(self.dwconv(x).permute(0, 2, 3, 1))))
        g = y.norm(p=2, dim=(1, 2), keepdim=True)
        y = self.grn_gamma * (y * g / (g.mean(-1, keepdim=True) + 1e-6)) + self.grn_beta + y
        return x + self.gamma * self.pwconv2(y).permute(0, 3, 1, 2)


class MultiLabel(nn.Module):
    """Heads in a ModuleDict; the family head's size equals a hidden width by chance; species sees the family logits."""
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 13, 4, 4)
        self.stage = nn.Sequential(CNBlock(13), CNBlock(13), nn.Conv2d(13, 26, 2, 2))
        self.neck = nn.Linear(26, 19)
        self.family, self.genus = nn.Linear(19, 26), nn.Linear(19, 7)
        self.tags = nn.ModuleDict({"colour": nn.Linear(19, 5), "shape": nn.Linear(19, 3), "is_fruit": nn.Linear(19, 1)})

    def forward(self, x):
        z = F.relu(self.neck(self.stage(self.stem(x)).mean((2, 3))))
        return dict(family=self.family(z), genus=self.genus(z), **{k: getattr(self.tags, k)(z) for k in self.tags})


add("convnext_multilabel", MultiLabel, lambda: dict(x=torch.randn(3, 3, 32, 32)), {
    "stem.weight": M, "*.dwconv.weight": EL, "*.pwconv?.weight": M, "*.grn_*": EL, "*.gamma": EL, "stage.2.weight": M, "neck.weight": M,
    "family.weight": OUT, "genus.weight": OUT, "tags.*.weight": OUT})


# ---------------------------------------------------------------- MLP-Mixer with gMLP spatial gate
class MixerBlock(nn.Module):
    def __init__(self, n, d, tok, ch):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.token_mlp = nn.Sequential(nn.Conv1d(n, tok, 1), nn.GELU(), nn.Conv1d(tok, n, 1))
        self.proj_in, self.proj_out = nn.Linear(d, 2 * ch), nn.Linear(ch, d)
        self.spatial = nn.Parameter(torch.randn(n, n) * 0.01)
        self.spatial_b = nn.Parameter(torch.ones(n, 1))

    def forward(self, x):
        x = x + self.token_mlp(self.norm1(x))
        u, v = F.gelu(self.proj_in(self.norm2(x))).chunk(2, -1)
        return x + self.proj_out(u * (self.spatial @ v + self.spatial_b))


class Mixer(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(48, 23)
        self.blocks = nn.Sequential(*[MixerBlock(9, 23, 14, 17) for _ in range(2)])
        self.head = nn.Linear(23, 23)  # as many classes as channels

    def forward(self, x):
        p = F.unfold(x, 4, stride=4).transpose(1, 2)
        return self.head(self.blocks(self.embed(p)).mean(1))


add("mixer_gmlp", Mixer, lambda: (torch.randn(2, 3, 12, 12),), {
    "embed.weight": M, "*.token_mlp.?.weight": M, "*.proj_in.weight": mat([17, 17]), "*.proj_out.weight": M, "*.spatial": M, "*.spatial_b": EL,
    "head.weight": OUT})


# ---------------------------------------------------------------- diffusion U-Net with FiLM time embedding, attention by 1x1 convs
class ResBlock(nn.Module):
    def __init__(self, i, o, temb):
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(2, i), nn.Conv2d(i, o, 3, padding=1)
        self.emb_layers = nn.Sequential(nn.SiLU(), nn.Linear(temb, 2 * o))
        self.norm2, self.conv2 = nn.GroupNorm(2, o), nn.Conv2d(o, o, 3, padding=1)
        self.skip = nn.Conv2d(i, o, 1) if i != o else nn.Identity()

    def forward(self, x, e):
        h = self.conv1(F.silu(self.norm1(x)))
        scale, shift = self.emb_layers(e)[:, :, None, None].chunk(2, dim=1)
        return self.skip(x) + self.conv2(F.silu(self.norm2(h) * (1 + scale) + shift))


class AttnBlock(nn.Module):
    def __init__(self, c, heads, ctx):
        super().__init__()
        self.heads = heads
        self.norm, self.qkv, self.proj_out = nn.GroupNorm(2, c), nn.Conv1d(c, 3 * c, 1), nn.Conv1d(c, c, 1)
        self.encoder_kv = nn.Conv1d(ctx, 2 * c, 1)

    def forward(self, x, ctx):
        b, c, *sp = x.shape
        h = x.reshape(b, c, -1)
        qkv = self.qkv(self.norm(h)).reshape(b * self.heads, -1, h.shape[-1])
        q, k, v = qkv.split(c // self.heads, dim=1)  # legacy order: per head q,k,v
        ek, ev = self.encoder_kv(ctx).reshape(b * self.heads, -1, ctx.shape[-1]).split(c // self.heads, dim=1)
        k, v = torch.cat([ek, k], -1), torch.cat([ev, v], -1)
        a = torch.einsum("bct,bcs->bts", q, k).softmax(-1)
        return (h + self.proj_out(torch.einsum("bts,bcs->bct", a, v).reshape(b, c, -1))).reshape(b, c, *sp)


class UNet(nn.Module):
    def __init__(self, ch=8, temb=21):
        super().__init__()
        self.ch = ch
        self.time_embed = nn.Sequential(nn.Linear(ch, temb), nn.SiLU(), nn.Linear(temb, temb))
        self.label_emb = nn.Embedding(5, temb)
        self.ctx_proj = nn.Linear(10, 11)
        self.inp = nn.Conv2d(3, ch, 3, padding=1)
        self.d1, self.down = ResBlock(ch, ch, temb), nn.Conv2d(ch, 12, 3, 2, 1)
        self.d2, self.mid = ResBlock(12, 16, temb), AttnBlock(16, 2, 11)
        self.up = nn.ConvTranspose2d(16, 12, 4, 2, 1)
        self.u1 = ResBlock(12 + ch, ch, temb)
        self.out = nn.Sequential(nn.GroupNorm(2, ch), nn.SiLU(), nn.Conv2d(ch, 3, 3, padding=1))

    def forward(self, x, t, y, ctx):
        f = torch.exp(-math.log(1e4) * torch.arange(self.ch // 2, device=x.device) / (self.ch // 2))
        te = torch.cat([(t[:, None] * f).cos(), (t[:, None] * f).sin()], -1)
        e = self.time_embed(te) + self.label_emb(y)
        h1 = self.d1(self.inp(x), e)
        h = self.mid(self.d2(self.down(h1), e), self.ctx_proj(ctx).mT)
        return self.out(self.u1(torch.cat([self.up(h), h1], 1), e))


add("diffusion_unet", UNet, lambda: dict(x=torch.randn(2, 3, 8, 8), t=torch.rand(2), y=torch.tensor([1, 4]), ctx=torch.randn(2, 3, 10)), {
    "time_embed.?.weight": M, "label_emb.weight": EMB, "ctx_proj.weight": M, "inp.weight": M, "down.weight": M, "*conv?.weight": M,
    "d1.emb_layers.1.weight": mat([8, 8]), "u1.emb_layers.1.weight": mat([8, 8]), "d2.emb_layers.1.weight": mat([16, 16]), "*.skip.weight": M,
    "mid.qkv.weight": mat([8, 8, 8], interleaved=True), "mid.encoder_kv.weight": mat([8, 8], interleaved=True), "mid.proj_out.weight": M,
    "up.weight": arg(mat(transposed=True)), "out.2.weight": OUT})


# ---------------------------------------------------------------- DiT with adaLN-zero, learned sigma, label dropout row
class DiTBlock(nn.Module):
    def __init__(self, d, h):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(d, elementwise_affine=False), nn.LayerNorm(d, elementwise_affine=False)
        self.attn = nn.MultiheadAttention(d, h, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(d, 59), nn.GELU(approximate="tanh"), nn.Linear(59, d))
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(d, 6 * d))
        self.scale_shift_table = nn.Parameter(torch.randn(6, d) / d ** 0.5)

    def forward(self, x, c):
        s1, g1, a1, s2, g2, a2 = (self.adaLN_modulation(c) + self.scale_shift_table.flatten()).chunk(6, dim=1)
        y = self.norm1(x) * (1 + g1[:, None]) + s1[:, None]
        x = x + a1[:, None] * self.attn(y, y, y, need_weights=False)[0]
        return x + a2[:, None] * self.mlp(self.norm2(x) * (1 + g2[:, None]) + s2[:, None])


class DiT(nn.Module):
    def __init__(self, d=24, patch=2, c=3):
        super().__init__()
        self.x_embedder = nn.Conv2d(c, d, patch, patch)
        self.t_embedder = nn.Sequential(nn.Linear(16, d), nn.SiLU(), nn.Linear(d, d))
        self.y_embedder = nn.Embedding(11, d)
        self.register_buffer("pos_embed", torch.randn(1, 16, d))
        self.blocks = nn.ModuleList([DiTBlock(d, 3) for _ in range(2)])
        self.final_adaLN = nn.Linear(d, 2 * d)
        self.final_norm = nn.LayerNorm(d, elementwise_affine=False)
        self.final_linear = nn.Linear(d, patch * patch * 2 * c)

    def forward(self, x, t, y):
        x = self.x_embedder(x).flatten(2).transpose(1, 2) + self.pos_embed
        fr = t[:, None] * torch.arange(8, device=t.device).exp().reciprocal()
        c = self.t_embedder(torch.cat([fr.sin(), fr.cos()], -1)) + self.y_embedder(y)
        for b in self.blocks:
            x = b(x, c)
        shift, scale = self.final_adaLN(F.silu(c)).chunk(2, dim=1)
        x = self.final_linear(self.final_norm(x) * (1 + scale[:, None]) + shift[:, None])
        x = x.reshape(-1, 4, 4, 2, 2, 6)
        return torch.einsum("nhwpqc->nchpwq", x).reshape(-1, 6, 8, 8).chunk(2, dim=1)


add("dit_adaln", DiT, lambda: (torch.randn(2, 3, 8, 8), torch.rand(2), torch.tensor([0, 10])), {
    "x_embedder.weight": M, "t_embedder.?.weight": M, "y_embedder.weight": EMB, "*.in_proj_weight": mat([24] * 3), "*.out_proj.weight": M,
    "*.mlp.?.weight": M, "*.adaLN_modulation.1.weight": mat([24] * 6), "*.scale_shift_table": EL, "final_adaLN.weight": mat([24, 24]),
    "final_linear.weight": OUT})


# ---------------------------------------------------------------- VAEs
class MLPVAE(nn.Module):
    """The 2014 one: two heads of the encoder, returned for the KL and used for z."""
    def __init__(self):
        super().__init__()
        self.fc1, self.fc21, self.fc22 = nn.Linear(50, 32), nn.Linear(32, 6), nn.Linear(32, 6)
        self.fc3, self.fc4 = nn.Linear(6, 32), nn.Linear(32, 50)

    def forward(self, x):
        h = F.relu(self.fc1(x.view(-1, 50)))
        mu, logvar = self.fc21(h), self.fc22(h)
        z = mu + torch.exp(0.5 * logvar) * torch.randn_like(mu)
        return torch.sigmoid(self.fc4(F.relu(self.fc3(z)))), mu, logvar


add("vae_mlp", MLPVAE, lambda: (torch.rand(4, 5, 10),), {
    "fc1.weight": M, "fc2?.weight": arg(M), "fc3.weight": M, "fc4.weight": OUT})


class VQVAE(nn.Module):
    """Convolutional, straight-through codebook, fused pre-quant moments, weight-normed decoder."""
    def __init__(self):
        super().__init__()
        wn = nn.utils.parametrizations.weight_norm
        self.enc = nn.Sequential(nn.Conv1d(2, 9, 4, 2, 1), nn.ELU(), nn.Conv1d(9, 12, 4, 2, 1))
        self.pre = nn.Conv1d(12, 7, 1)
        self.codebook = nn.Embedding(20, 7)
        self.dec = nn.Sequential(wn(nn.Conv1d(7, 15, 3, padding=1)), nn.ELU(), wn(nn.ConvTranspose1d(15, 10, 4, 2, 1), dim=1), nn.ELU(), nn.Upsample(scale_factor=2),
                                 wn(nn.Conv1d(10, 2, 3, padding=1)), nn.Tanh())

    def forward(self, x):
        z = self.pre(self.enc(x)).transpose(1, 2)
        d = (z.pow(2).sum(-1, keepdim=True) - 2 * z @ self.codebook.weight.t() + self.codebook.weight.pow(2).sum(1))
        q = self.codebook(d.argmin(-1))
        vq = F.mse_loss(q, z.detach()) + 0.25 * F.mse_loss(z, q.detach())
        return self.dec((z + (q - z).detach()).transpose(1, 2)), vq


add("vqvae_weight_norm", VQVAE, lambda: (torch.randn(2, 2, 16),), {
    "enc.?.weight": M, "pre.weight": M, "codebook.weight": EMB, "*.original0": EL, "dec.0.*.original1": M,
    "dec.2.*.original1": arg(mat(transposed=True)), "dec.5.*.original1": OUT})


# ---------------------------------------------------------------- DETR-like with hungarian matching on the host (numpy) in training
class DETR(nn.Module):
    def __init__(self, d=20, q=5, classes=4):
        super().__init__()
        self.backbone = nn.Sequential(nn.Conv2d(3, 12, 8, 8), nn.BatchNorm2d(12), nn.ReLU())
        self.input_proj = nn.Conv2d(12, d, 1)
        self.row_embed, self.col_embed = nn.Parameter(torch.rand(8, d // 2)), nn.Parameter(torch.rand(8, d // 2))
        self.query_embed = nn.Embedding(q, d)
        self.decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(d, 2, 38, 0.0, batch_first=True), 2)
        self.class_embed = nn.Linear(d, classes + 1)
        self.bbox_embed = nn.ModuleList([nn.Linear(d, d), nn.Linear(d, 4)])

    def forward(self, img, target_cls):
        f = self.input_proj(self.backbone(img))
        b, d, H, W = f.shape
        pos = torch.cat([self.col_embed[:W][None].repeat(H, 1, 1), self.row_embed[:H][:, None].repeat(1, W, 1)], -1)
        mem = f.flatten(2).transpose(1, 2) + pos.flatten(0, 1)
        hs = self.decoder(self.query_embed.weight[None].expand(b, -1, -1), mem)
        logits = self.class_embed(hs)
        boxes = self.bbox_embed[1](F.relu(self.bbox_embed[0](hs))).sigmoid()
        cost = logits.detach().softmax(-1).cpu().numpy()[:, :, 0].argmax(-1)  # a stand-in for scipy's matcher
        pick = torch.as_tensor(cost, device=img.device)
        loss = F.cross_entropy(logits[torch.arange(b), pick], target_cls)
        return {"loss": loss, "pred_boxes": boxes, "pred_logits": logits}


add("detr_host_matching", DETR, lambda: (torch.randn(2, 3, 32, 32), torch.tensor([0, 2])), {
    "backbone.0.weight": M, "input_proj.weight": M, "???_embed": EL, "query_embed.weight": arg(EMB),  # owned by nn.Embedding; learned queries
    "*.in_proj_weight": mat([20] * 3), "*.out_proj.weight": M, "*.linear?.weight": M, "class_embed.weight": OUT,
    "bbox_embed.0.weight": M, "bbox_embed.1.weight": OUT})


# ---------------------------------------------------------------- NeRF with skip
class NeRF(nn.Module):
    def __init__(self, W=25, L=3):
        super().__init__()
        self.L = L
        self.pts_linears = nn.ModuleList([nn.Linear(6 * L, W), nn.Linear(W, W), nn.Linear(W + 6 * L, W), nn.Linear(W, W)])
        self.alpha_linear, self.feature_linear = nn.Linear(W, 1), nn.Linear(W, W)
        self.views_linear, self.rgb_linear = nn.Linear(W + 3, W // 2), nn.Linear(W // 2, 3)

    def forward(self, x, d):
        e = torch.cat([f(x * 2 ** i) for i in range(self.L) for f in (torch.sin, torch.cos)], -1)
        h = e
        for i, l in enumerate(self.pts_linears):
            h = F.relu(l(h))
            if i == 1:
                h = torch.cat([e, h], -1)
        alpha = self.alpha_linear(h)
        rgb = self.rgb_linear(F.relu(self.views_linear(torch.cat([self.feature_linear(h), d], -1))))
        w = 1 - torch.exp(-F.softplus(alpha))
        return (w * rgb.sigmoid()).sum(1), w.squeeze(-1)


add("nerf", NeRF, lambda: (torch.randn(4, 6, 3), torch.randn(4, 6, 3)), {
    "pts_linears.*.weight": M, "feature_linear.weight": M, "views_linear.weight": M, "alpha_linear.weight": OUT, "rgb_linear.weight": OUT})


# ---------------------------------------------------------------- CLIP
class CLIP(nn.Module):
    def __init__(self, proj=14):
        super().__init__()
        self.visual = nn.Sequential(nn.Conv2d(3, 16, 4, 4), nn.GELU(), nn.Conv2d(16, 18, 3, 1, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.token_embedding = nn.Embedding(44, 20)
        self.positional_embedding = nn.Parameter(torch.empty(8, 20).normal_(std=0.01))
        self.text = nn.TransformerEncoderLayer(20, 2, 50, 0.0, batch_first=True)
        self.ln_final = nn.LayerNorm(20)
        self.visual_projection = nn.Linear(18, proj, bias=False)
        self.text_projection = nn.Parameter(torch.randn(20, proj) * 0.1)
        self.logit_scale = nn.Parameter(torch.ones([]) * 2.65)

    def forward(self, image, text):
        i = F.normalize(self.visual_projection(self.visual(image)), dim=-1)
        x = self.ln_final(self.text(self.token_embedding(text) + self.positional_embedding[: text.size(1)]))
        t = F.normalize(x[torch.arange(x.size(0)), text.argmax(-1)] @ self.text_projection, dim=-1)
        logits = self.logit_scale.exp() * i @ t.t()
        lab = torch.arange(len(i), device=i.device)
        return (F.cross_entropy(logits, lab) + F.cross_entropy(logits.t(), lab)) / 2


add("clip", CLIP, lambda: (torch.randn(3, 3, 16, 16), torch.randint(0, 44, (3, 6))), {
    "visual.?.weight": M, "token_embedding.weight": EMB, "positional_embedding": EL, "text.self_attn.in_proj_weight": mat([20] * 3),
    "text.self_attn.out_proj.weight": M, "text.linear?.weight": M, "visual_projection.weight": arg(OUT), "text_projection": arg(OUT)})
