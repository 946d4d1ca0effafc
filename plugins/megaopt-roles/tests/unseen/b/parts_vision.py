"""Vision: transformers, detection, diffusion, quantization, capsules, latents."""

import torch
import torch.nn.functional as F
from einops import rearrange, repeat
from torch import nn

EMB, OUT, MAT, ELE = "embedding", "output", "matrix", "elementwise"
D = 32


def elementwise(prefix, *names):
    return {prefix + n: (ELE, None) for n in names}


def matrices(prefix, *names):
    return {prefix + n: (MAT, None) for n in names}


def norm(prefix):
    return elementwise(prefix, ".weight", ".bias")


def linears(prefix, *names):
    return matrices(prefix, *(n + ".weight" for n in names)) | elementwise(prefix, *(n + ".bias" for n in names))


def split(*sizes, **more):
    return dict(dim=0, sizes=list(sizes), interleaved=False, **more)


# --- 18: ViT with registers, layer scale, fused SwiGLU by slices


class ViTBlock(nn.Module):
    def __init__(self, hidden=48):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(D), nn.LayerNorm(D)
        self.qkv, self.proj = nn.Linear(D, 3 * D, bias=False), nn.Linear(D, D)
        self.ls1, self.ls2 = nn.Parameter(1e-1 * torch.ones(D)), nn.Parameter(1e-1 * torch.ones(D))
        self.w12, self.w3, self.hidden = nn.Linear(D, 2 * hidden), nn.Linear(hidden, D), hidden

    def forward(self, x):
        q, k, v = rearrange(self.qkv(self.norm1(x)), "b n (qkv h d) -> qkv b h n d", qkv=3, h=4)
        y = F.scaled_dot_product_attention(q, k, v)
        x = x + self.ls1 * self.proj(rearrange(y, "b h n d -> b n (h d)"))
        h = self.w12(self.norm2(x))
        return x + self.ls2 * self.w3(F.silu(h[..., : self.hidden]) * h[..., self.hidden :])


class RegisterViT(nn.Module):
    def __init__(self, classes=7, registers=3):
        super().__init__()
        self.patch = nn.Conv2d(3, D, 4, 4)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, D))
        self.register_tokens = nn.Parameter(torch.randn(1, registers, D) * 0.02)
        self.pos = nn.Parameter(torch.randn(1, 17, D) * 0.02)
        self.blocks = nn.Sequential(*[ViTBlock() for _ in range(2)])
        self.norm, self.fc = nn.LayerNorm(D), nn.Linear(2 * D, classes)

    def forward(self, img):
        x = self.patch(img).flatten(2).mT
        x = torch.cat([self.cls_token.expand(len(x), -1, -1), x], 1) + self.pos
        x = torch.cat([x[:, :1], self.register_tokens.expand(len(x), -1, -1), x[:, 1:]], 1)
        x = self.norm(self.blocks(x))
        return self.fc(torch.cat([x[:, 0], x[:, 4:].mean(1)], -1))


vit_expected = linears("", "patch") | norm("norm") | elementwise("", "cls_token", "register_tokens", "pos", "fc.bias")
vit_expected["fc.weight"] = (OUT, None)
for i in range(2):
    p = f"blocks.{i}."
    vit_expected |= norm(p + "norm1") | norm(p + "norm2") | linears(p, "proj", "w3")
    vit_expected |= elementwise(p, "ls1", "ls2", "w12.bias")
    vit_expected |= {p + "qkv.weight": (MAT, split(D, D, D)), p + "w12.weight": (MAT, split(48, 48))}


# --- 19: Swin with a bare table of relative biases and merging of patches


class WindowAttention(nn.Module):
    def __init__(self, dim, win=2, heads=4):
        super().__init__()
        self.win, self.h = win, heads
        self.relative_position_bias_table = nn.Parameter(torch.randn((2 * win - 1) ** 2, heads) * 0.02)
        c = torch.stack(torch.meshgrid(torch.arange(win), torch.arange(win), indexing="ij")).flatten(1)
        rel = (c[:, :, None] - c[:, None]).permute(1, 2, 0) + win - 1
        self.register_buffer("index", rel[..., 0] * (2 * win - 1) + rel[..., 1], persistent=False)
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.logit_scale = nn.Parameter(torch.zeros(heads, 1, 1))

    def forward(self, x):
        n, t, c = x.shape
        q, k, v = self.qkv(x).reshape(n, t, 3, self.h, c // self.h).permute(2, 0, 3, 1, 4).unbind(0)
        a = F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).transpose(-2, -1) * self.logit_scale.exp()
        a = a + self.relative_position_bias_table[self.index.view(-1)].view(t, t, -1).permute(2, 0, 1)
        return self.proj((a.softmax(-1) @ v).transpose(1, 2).reshape(n, t, c))


class SwinBlock(nn.Module):
    def __init__(self, dim, shift):
        super().__init__()
        self.shift = shift
        self.attn, self.n1, self.n2 = WindowAttention(dim), nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.fc1, self.fc2 = nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)

    def forward(self, x):
        s = x.shape[1] // 2
        h = torch.roll(x, (-self.shift, -self.shift), (1, 2))
        h = rearrange(h, "b (i p) (j q) c -> (b i j) (p q) c", p=2, q=2)
        h = rearrange(self.n1(self.attn(h)), "(b i j) (p q) c -> b (i p) (j q) c", i=s, j=s, p=2)
        x = x + torch.roll(h, (self.shift, self.shift), (1, 2))
        return x + self.n2(self.fc2(F.gelu(self.fc1(x))))


class Merge(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.reduction, self.norm = nn.Linear(4 * dim, 2 * dim, bias=False), nn.LayerNorm(4 * dim)

    def forward(self, x):
        return self.reduction(self.norm(rearrange(x, "b (h p) (w q) c -> b h w (p q c)", p=2, q=2)))


class MiniSwin(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 2, 2), nn.GroupNorm(1, 16))
        self.stage1, self.merge = nn.Sequential(SwinBlock(16, 0), SwinBlock(16, 1)), Merge(16)
        self.stage2 = nn.Sequential(SwinBlock(32, 0), SwinBlock(32, 1))
        self.head = nn.Linear(32, 10)

    def forward(self, x):
        x = self.stem(x).permute(0, 2, 3, 1)
        x = self.stage2(self.merge(self.stage1(x)))
        return self.head(x.mean((1, 2)))


swin_expected = linears("stem.", "0") | norm("stem.1") | matrices("", "merge.reduction.weight") | norm("merge.norm")
swin_expected |= {"head.weight": (OUT, None), "head.bias": (ELE, None)}
for stage, dim in (("stage1", 16), ("stage2", 32)):
    for i in range(2):
        p = f"{stage}.{i}."
        swin_expected |= norm(p + "n1") | norm(p + "n2") | linears(p, "fc1", "fc2", "attn.proj")
        swin_expected |= elementwise(p + "attn.", "relative_position_bias_table", "logit_scale", "qkv.bias")
        swin_expected[p + "attn.qkv.weight"] = (MAT, split(dim, dim, dim))


# --- 20: DETR: a convolutional stem, queries in an nn.Embedding, three kinds of detection heads, deep supervision


class MLP(nn.Module):
    def __init__(self, dims):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in zip(dims, dims[1:]))

    def forward(self, x):
        for i, layer in enumerate(self.layers):
            x = layer(x).relu() if i < len(self.layers) - 1 else layer(x)
        return x


class MiniDETR(nn.Module):
    def __init__(self, classes=9, queries=5):
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv2d(3, 16, 3, 2, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 24, 3, 2, 1), nn.ReLU()
        )
        self.input_proj = nn.Conv2d(24, D, 1)
        self.row_embed, self.col_embed = nn.Parameter(torch.rand(8, D // 2)), nn.Parameter(torch.rand(8, D // 2))
        self.query_embed = nn.Embedding(queries, D)
        self.encoder = nn.TransformerEncoderLayer(D, 4, 48, dropout=0.0, batch_first=True)
        self.decoder = nn.ModuleList(
            nn.TransformerDecoderLayer(D, 4, 48, dropout=0.0, batch_first=True) for _ in range(2)
        )
        self.class_embed = nn.Linear(D, classes + 1)
        self.bbox_embed = MLP([D, D, D, 4])
        self.mask_embed = MLP([D, D, D])

    def forward(self, images):
        f = self.input_proj(self.backbone(images))
        h, w = f.shape[-2:]
        pos = torch.cat([repeat(self.col_embed[:w], "w c -> h w c", h=h), repeat(self.row_embed[:h], "h c -> h w c", w=w)], -1)
        memory = self.encoder(rearrange(f, "b c h w -> b (h w) c") + pos.flatten(0, 1))
        x = self.query_embed.weight.unsqueeze(0).repeat(len(images), 1, 1)
        out = []
        for layer in self.decoder:
            x = layer(x, memory)
            masks = torch.einsum("bqc,bnc->bqn", self.mask_embed(x), memory)
            out.append(dict(logits=self.class_embed(x), boxes=self.bbox_embed(x).sigmoid(), masks=masks))
        return out


def torch_layer(p, cross):
    e = {p + "self_attn.in_proj_weight": (MAT, split(D, D, D))} | linears(p, "self_attn.out_proj", "linear1", "linear2")
    e |= elementwise(p, "self_attn.in_proj_bias") | norm(p + "norm1") | norm(p + "norm2")
    if cross:
        e |= {p + "multihead_attn.in_proj_weight": (MAT, split(D, D, D))} | linears(p, "multihead_attn.out_proj")
        e |= elementwise(p, "multihead_attn.in_proj_bias") | norm(p + "norm3")
    return e


detr_expected = matrices("", "backbone.0.weight") | norm("backbone.1") | linears("", "backbone.3", "input_proj")
detr_expected |= elementwise("", "row_embed", "col_embed", "class_embed.bias", "bbox_embed.layers.2.bias")
detr_expected |= {
    "query_embed.weight": (EMB, None, "arguable"),  # owned by nn.Embedding; learned queries
    "class_embed.weight": (OUT, None),
    "bbox_embed.layers.2.weight": (OUT, None),
}
detr_expected |= torch_layer("encoder.", False) | torch_layer("decoder.0.", True) | torch_layer("decoder.1.", True)
detr_expected |= linears("bbox_embed.layers.", "0", "1") | linears("mask_embed.layers.", "0")
detr_expected |= elementwise("", "mask_embed.layers.1.bias")
# its product is contracted with features before it leaves: hidden, or a head
detr_expected["mask_embed.layers.1.weight"] = (MAT, None, "arguable")
