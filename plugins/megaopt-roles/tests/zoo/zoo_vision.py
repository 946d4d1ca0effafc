"""Models of images, video and fields, and what each of their parameters is."""

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


class RelativeAttention(nn.Module):
    """Attention whose bare bias table is indexed by a buffer of offsets."""

    def __init__(self, dim: int = 16, heads: int = 2, window: int = 4) -> None:
        super().__init__()
        self.heads, self.window = heads, window
        self.relative_bias_table = nn.Parameter(torch.zeros((2 * window - 1) ** 2, heads))
        coords = torch.zeros(2, window * window, dtype=torch.long)
        self.register_buffer("relative_index", coords[0][:, None] - coords[1][None, :])
        self.to_qkv = nn.Linear(dim, dim * 3, bias=False)
        self.to_out = nn.Sequential(nn.Linear(dim, dim), nn.Dropout(0.1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, n, c = x.shape
        qkv = self.to_qkv(x).reshape(b, n, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)
        q, k, v = qkv[0], qkv[1], qkv[2]
        attn = q @ k.transpose(-2, -1)
        bias = self.relative_bias_table[self.relative_index.view(-1)].view(n, n, -1).permute(2, 0, 1)
        attn = (attn + bias.unsqueeze(0)).softmax(dim=-1)
        return self.to_out((attn @ v).transpose(1, 2).reshape(b, n, c))


class GatheredAttention(nn.Module):
    """The same with the index repeated per head and gathered, and a 4-D table that is interpolated."""

    def __init__(self, dim: int = 16, heads: int = 2, size: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.relative_bias_table = nn.Parameter(torch.zeros(49, heads))
        self.register_buffer("relative_index", torch.zeros(256, 1, dtype=torch.long))
        self.table = nn.Parameter(torch.zeros(1, heads, 7, 7))
        self.qkv = nn.Linear(dim, dim * 3)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1)
        )
        dots = torch.matmul(q, k.transpose(-1, -2))
        bias = self.relative_bias_table.gather(0, self.relative_index.repeat(1, self.heads))
        dots = dots + bias.view(16, 16, -1).permute(2, 0, 1).unsqueeze(0)
        dots = dots + F.interpolate(self.table, size=(16, 16), mode="bicubic")
        return self.proj(torch.matmul(dots.softmax(-1), v).transpose(1, 2).flatten(2))


class WindowClassifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 4, 4)
        self.pos = nn.Parameter(torch.zeros(1, 16, 4, 4))
        self.window, self.gathered = RelativeAttention(), GatheredAttention()
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = (self.stem(x) + self.pos).flatten(2).transpose(1, 2)
        x = x + self.window(x)
        x = x + self.gathered(x)
        return self.head(self.norm(x).mean(1))


class SqueezeExcite(nn.Module):
    def __init__(self, c: int) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Conv2d(c, c // 4, 1), nn.Conv2d(c // 4, c, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.sigmoid(self.fc2(F.silu(self.fc1(x.mean((2, 3), keepdim=True)))))


class InvertedResidual(nn.Module):
    def __init__(self, c: int = 8) -> None:
        super().__init__()
        self.expand = nn.Conv2d(c, 4 * c, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(4 * c)
        self.depthwise = nn.Conv2d(4 * c, 4 * c, 3, padding=1, groups=4 * c, bias=False)
        self.se = SqueezeExcite(4 * c)
        self.project = nn.Conv2d(4 * c, c, 1, bias=False)
        self.layer_scale = nn.Parameter(torch.ones(c, 1, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.se(self.depthwise(F.silu(self.bn1(self.expand(x)))))
        return x + self.layer_scale * self.project(y)


class StandardizedConv(nn.Conv2d):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        w = self.weight
        w = w - w.mean(dim=[1, 2, 3], keepdim=True)
        w = w / (w.std(dim=(1, 2, 3), keepdim=True) + 1e-5)
        return F.conv2d(x, w, self.bias, self.stride, self.padding, self.dilation, self.groups)


class SmallConvNet(nn.Module):
    """Ends like many of torchvision's: pooling, then a sequence of dropout and linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            StandardizedConv(3, 8, 3), nn.ReLU(), InvertedResidual(), nn.MaxPool2d(2)
        )
        self.avgpool = nn.AdaptiveAvgPool2d((2, 2))
        self.classifier = nn.Sequential(
            nn.Linear(32, 24),
            nn.ReLU(inplace=True),
            nn.Dropout(),
            nn.Linear(24, 24),
            nn.ReLU(),
            nn.Linear(24, 10),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.classifier(torch.flatten(self.avgpool(self.features(x)), 1))


class ResBlock(nn.Module):
    def __init__(self, cin: int, cout: int, emb: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(2, cin), nn.Conv2d(cin, cout, 3, padding=1)
        self.emb = nn.Linear(emb, 2 * cout)
        self.norm2, self.conv2 = nn.GroupNorm(2, cout), nn.Conv2d(cout, cout, 3, padding=1)
        self.skip = nn.Conv2d(cin, cout, 1) if cin != cout else nn.Identity()

    def forward(self, x: torch.Tensor, emb: torch.Tensor) -> torch.Tensor:
        h = self.conv1(F.silu(self.norm1(x)))
        scale, shift = self.emb(F.silu(emb))[:, :, None, None].chunk(2, dim=1)
        h = self.conv2(F.silu(self.norm2(h) * (1 + scale) + shift))
        return h + self.skip(x)


class ConvAttention(nn.Module):
    def __init__(self, c: int, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.GroupNorm(2, c)
        self.qkv = nn.Conv1d(c, 3 * c, 1)
        self.proj_out = nn.Conv1d(c, c, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, c, *spatial = x.shape
        x = x.reshape(b, c, -1)
        qkv = self.qkv(self.norm(x))
        q, k, v = qkv.reshape(b * self.heads, -1, qkv.shape[-1]).split(c // self.heads, dim=1)
        weight = torch.einsum("bct,bcs->bts", q, k).softmax(-1)
        h = torch.einsum("bts,bcs->bct", weight, v).reshape(b, c, -1)
        return (x + self.proj_out(h)).reshape(b, c, *spatial)


class DiffusionUNet(nn.Module):
    def __init__(self, c: int = 8, classes: int = 4) -> None:
        super().__init__()
        self.time_embed = nn.Sequential(nn.Linear(c, 32), nn.SiLU(), nn.Linear(32, 32))
        self.label_emb = nn.Embedding(classes, 32)
        self.conv_in = nn.Conv2d(3, c, 3, padding=1)
        self.down_blocks = nn.ModuleList([ResBlock(c, c, 32), ResBlock(c, 2 * c, 32)])
        self.downsample = nn.Conv2d(2 * c, 2 * c, 3, stride=2, padding=1)
        self.mid = nn.ModuleList([ResBlock(2 * c, 2 * c, 32), ConvAttention(2 * c)])
        self.up_blocks = nn.ModuleList([ResBlock(4 * c, c, 32), ResBlock(2 * c, c, 32)])
        self.norm_out, self.conv_out = nn.GroupNorm(2, c), nn.Conv2d(c, 3, 3, padding=1)

    def forward(self, x: torch.Tensor, t: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        freqs = torch.exp(-math.log(1e4) * torch.arange(4) / 4)
        args = t[:, None].float() * freqs[None]
        emb = self.time_embed(torch.cat([torch.cos(args), torch.sin(args)], dim=-1)) + self.label_emb(y)
        h = self.conv_in(x)
        skips = []
        for block in self.down_blocks:
            h = block(h, emb)
            skips.append(h)
        h = self.downsample(h)
        h = self.mid[1](self.mid[0](h, emb))
        h = F.interpolate(h, scale_factor=2.0)
        for block in self.up_blocks:
            h = block(torch.cat([h, skips.pop()], dim=1), emb)
        return self.conv_out(F.silu(self.norm_out(h)))


class QuantizedAutoencoder(nn.Module):
    """The codes are looked up by distance: the table is an nn.Embedding, or a bare codebook."""

    def __init__(self, d: int = 8, codes: int = 12) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Conv2d(3, d, 4, 2, 1), nn.ReLU(), nn.Conv2d(d, d, 1))
        self.codebook = nn.Embedding(codes, d)
        self.decoder = nn.Sequential(
            nn.Conv2d(d, d, 3, padding=1), nn.ReLU(), nn.ConvTranspose2d(d, 3, 4, 2, 1)
        )

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        z = self.encoder(x).permute(0, 2, 3, 1).contiguous()
        flat = z.view(-1, z.shape[-1])
        distances = (
            flat.pow(2).sum(1, keepdim=True)
            + (self.codebook.weight**2).sum(1)
            - 2 * torch.matmul(flat, self.codebook.weight.t())
        )
        codes = distances.argmin(dim=1)
        quantized = self.codebook(codes).view(z.shape)
        loss = F.mse_loss(quantized.detach(), z) + F.mse_loss(quantized, z.detach())
        quantized = z + (quantized - z).detach()
        return self.decoder(quantized.permute(0, 3, 1, 2)), loss


class NeRF(nn.Module):
    def __init__(self, depth: int = 4, width: int = 16, views: int = 9) -> None:
        super().__init__()
        self.skips = [2]
        self.pts_linears = nn.ModuleList(
            [nn.Linear(15, width)]
            + [nn.Linear(width + 15 if i in self.skips else width, width) for i in range(depth - 1)]
        )
        self.views_linears = nn.ModuleList([nn.Linear(views + width, width // 2)])
        self.feature_linear = nn.Linear(width, width)
        self.alpha_linear = nn.Linear(width, 1)
        self.rgb_linear = nn.Linear(width // 2, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        input_pts, input_views = torch.split(x, [15, 9], dim=-1)
        h = input_pts
        for i, _ in enumerate(self.pts_linears):
            h = F.relu(self.pts_linears[i](h))
            if i in self.skips:
                h = torch.cat([input_pts, h], -1)
        alpha = self.alpha_linear(h)
        h = torch.cat([self.feature_linear(h), input_views], -1)
        for layer in self.views_linears:
            h = F.relu(layer(h))
        return torch.cat([self.rgb_linear(h), alpha], -1)


class ConvLSTM(nn.Module):
    def __init__(self, cin: int = 3, hidden: int = 4) -> None:
        super().__init__()
        self.hidden = hidden
        self.conv = nn.Conv2d(cin + hidden, 4 * hidden, 3, padding=1)
        self.peephole = nn.Parameter(torch.zeros(1, hidden, 8, 8))
        self.final = nn.Conv2d(hidden, cin, 1)

    def forward(self, video: torch.Tensor) -> torch.Tensor:
        h = c = torch.zeros(video.size(0), self.hidden, 8, 8)
        for t in range(video.size(1)):
            combined = self.conv(torch.cat([video[:, t], h], dim=1))
            i, f, o, g = torch.split(combined, self.hidden, dim=1)
            c = torch.sigmoid(f) * c + torch.sigmoid(i + self.peephole * c) * torch.tanh(g)
            h = torch.sigmoid(o) * torch.tanh(c)
        return self.final(h)


class Capsules(nn.Module):
    def __init__(self, routes: int = 6, capsules: int = 3, cin: int = 4, cout: int = 5) -> None:
        super().__init__()
        self.primary = nn.Conv2d(1, 8, 3)
        self.W = nn.Parameter(torch.zeros(1, routes, capsules, cout, cin))
        self.decoder = nn.Sequential(
            nn.Linear(cout * capsules, 16), nn.ReLU(), nn.Linear(16, 64), nn.Sigmoid()
        )

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        u = self.primary(x).view(x.size(0), 6, 4)
        u = torch.stack([u] * 3, dim=2).unsqueeze(4)
        u_hat = torch.matmul(torch.cat([self.W] * 2, dim=0), u)
        b = torch.zeros(1, 6, 3, 1)
        for _ in range(3):
            v = (F.softmax(b, dim=1) * u_hat.squeeze(-1)).sum(dim=1, keepdim=True)
            b = b + (u_hat.squeeze(-1) * v).sum(-1, keepdim=True)
        v = v.squeeze(1)
        return v.norm(dim=-1), self.decoder(v.reshape(v.size(0), -1))


class Contrastive(nn.Module):
    """A backbone with its classifier taken away, and a projector with a bottleneck after it."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.AdaptiveAvgPool2d(1)
        )
        self.projector = nn.Sequential(
            nn.Linear(16, 16, bias=False),
            nn.BatchNorm1d(16),
            nn.ReLU(inplace=True),
            nn.Linear(16, 12, bias=False),
        )

    def forward(self, x1: torch.Tensor, x2: torch.Tensor) -> torch.Tensor:
        z1 = F.normalize(self.projector(self.backbone(x1).flatten(1)), dim=1)
        z2 = F.normalize(self.projector(self.backbone(x2).flatten(1)), dim=1)
        return z1 @ z2.T / 0.1


class MaskedAutoencoder(nn.Module):
    def __init__(self, dim: int = 16, patch: int = 12) -> None:
        super().__init__()
        self.patch_embed = nn.Linear(patch, dim)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, dim))
        self.pos_embed = nn.Parameter(torch.zeros(1, 10, dim), requires_grad=False)
        self.blocks = nn.ModuleList([nn.TransformerEncoderLayer(dim, 2, 32, batch_first=True)])
        self.decoder_embed = nn.Linear(dim, 8)
        self.mask_token = nn.Parameter(torch.zeros(1, 1, 8))
        self.decoder_pos_embed = nn.Parameter(torch.zeros(1, 10, 8))
        self.decoder_blocks = nn.ModuleList([nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)])
        self.decoder_norm = nn.LayerNorm(8)
        self.decoder_pred = nn.Linear(8, patch)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.patch_embed(x) + self.pos_embed[:, 1:, :]
        n, length, d = x.shape
        keep = torch.argsort(torch.rand(n, length), dim=1)[:, :3]
        x = torch.gather(x, dim=1, index=keep.unsqueeze(-1).repeat(1, 1, d))
        x = torch.cat(((self.cls_token + self.pos_embed[:, :1, :]).expand(n, -1, -1), x), dim=1)
        for block in self.blocks:
            x = block(x)
        x = self.decoder_embed(x)
        x = torch.cat([x, self.mask_token.repeat(n, length - 3, 1)], dim=1) + self.decoder_pos_embed
        for block in self.decoder_blocks:
            x = block(x)
        return self.decoder_pred(self.decoder_norm(x))[:, 1:, :]


def block(name: str, dim: int) -> dict[str, MatrixView]:
    """Return what an encoder layer of torch is made of."""
    return {
        f"{name}.self_attn.in_proj_weight": split(dim, dim, dim),
        f"{name}.self_attn.out_proj.weight": M,
        f"{name}.linear1.weight": M,
        f"{name}.linear2.weight": M,
    }


EXPECTED = {
    "windows and bias tables": (
        WindowClassifier,
        {
            "pos": X,
            "stem.weight": M,
            "window.relative_bias_table": X,
            "window.to_qkv.weight": split(16, 16, 16),
            "window.to_out.0.weight": M,
            "gathered.relative_bias_table": X,
            "gathered.table": X,
            "gathered.qkv.weight": split(16, 16, 16),
            "gathered.proj.weight": M,
            "head.weight": O,
        },
    ),
    "inverted residuals": (
        SmallConvNet,
        {
            "features.0.weight": M,
            "features.2.layer_scale": X,
            "features.2.expand.weight": M,
            "features.2.depthwise.weight": X,
            "features.2.se.fc1.weight": M,
            "features.2.se.fc2.weight": M,
            "features.2.project.weight": M,
            "classifier.0.weight": M,
            "classifier.3.weight": M,
            "classifier.5.weight": O,
        },
    ),
    "diffusion U-Net": (
        DiffusionUNet,
        {
            "time_embed.0.weight": M,
            "time_embed.2.weight": M,
            "label_emb.weight": E,
            "conv_in.weight": M,
            "downsample.weight": M,
            "mid.1.qkv.weight": split(8, 8, 8),
            "mid.1.proj_out.weight": M,
            "conv_out.weight": O,
            **{
                f"{name}.{part}.weight": M
                for name in ("down_blocks.0", "down_blocks.1", "mid.0", "up_blocks.0", "up_blocks.1")
                for part in ("conv1", "conv2")
            },
            **{
                f"{name}.emb.weight": split(c, c)
                for name, c in (
                    ("down_blocks.0", 8),
                    ("down_blocks.1", 16),
                    ("mid.0", 16),
                    ("up_blocks.0", 8),
                    ("up_blocks.1", 8),
                )
            },
            **{f"{name}.skip.weight": M for name in ("down_blocks.1", "up_blocks.0", "up_blocks.1")},
        },
    ),
    "quantized autoencoder": (
        QuantizedAutoencoder,
        {
            "encoder.0.weight": M,
            "encoder.2.weight": M,
            "codebook.weight": E,
            "decoder.0.weight": M,
            "decoder.2.weight": O,
        },
    ),
    "radiance field": (
        NeRF,
        {
            **{f"pts_linears.{i}.weight": M for i in range(4)},
            "views_linears.0.weight": M,
            "feature_linear.weight": M,
            "alpha_linear.weight": O,
            "rgb_linear.weight": O,
        },
    ),
    "recurrent convolution": (ConvLSTM, {"peephole": X, "conv.weight": split(4, 4, 4, 4), "final.weight": O}),
    "capsules": (
        Capsules,
        {
            "W": MatrixView(batch_dims=3),
            "primary.weight": M,
            "decoder.0.weight": M,
            "decoder.2.weight": O,
        },
    ),
    "contrastive": (Contrastive, {"backbone.0.weight": M, "projector.0.weight": M, "projector.3.weight": O}),
    "masked autoencoder": (
        MaskedAutoencoder,
        {
            "cls_token": X,
            "pos_embed": X,
            "mask_token": X,
            "decoder_pos_embed": X,
            "patch_embed.weight": M,
            **block("blocks.0", 16),
            "decoder_embed.weight": M,
            **block("decoder_blocks.0", 8),
            "decoder_pred.weight": O,
        },
    ),
}
