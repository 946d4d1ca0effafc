import math, os, sys
import torch
from torch import nn
import torch.nn.functional as F
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from unseen_common import *
from models_odd import *

MODELS = []


def add(name, factory, example, rules):
    MODELS.append((name, factory, example, expect(factory, rules)))


# ---------------------------------------------------------------- hypernetwork: one net's products are another layer's weights
class HyperNet(nn.Module):
    def __init__(self, z=6, i=8, h=10, o=3):
        super().__init__()
        self.i, self.h, self.o = i, h, o
        self.task = nn.Embedding(4, z)
        self.trunk = nn.Linear(z, 15)
        self.gen_w1, self.gen_b1, self.gen_w2 = nn.Linear(15, i * h), nn.Linear(15, h), nn.Linear(15, h * o)

    def forward(self, x, task):
        g = F.relu(self.trunk(self.task(task)))
        w1 = self.gen_w1(g).view(-1, self.i, self.h)
        y = F.relu(torch.bmm(x, w1) + self.gen_b1(g)[:, None])
        return torch.bmm(y, self.gen_w2(g).view(-1, self.h, self.o))


add("hypernetwork", HyperNet, lambda: (torch.randn(2, 5, 8), torch.tensor([0, 3])), {
    "task.weight": EMB, "trunk.weight": M, "gen_w1.weight": M, "gen_b1.weight": M, "gen_w2.weight": arg(M)})


# ---------------------------------------------------------------- Fourier neural operator: complex weights, 1x1 bypass, lift and project
class SpectralConv(nn.Module):
    def __init__(self, c, modes):
        super().__init__()
        self.m = modes
        self.weights1 = nn.Parameter(torch.rand(c, c, modes, dtype=torch.cfloat) / c)

    def forward(self, x):
        ft = torch.fft.rfft(x)
        out = torch.zeros_like(ft)
        out[..., : self.m] = torch.einsum("bix,iox->box", ft[..., : self.m], self.weights1)
        return torch.fft.irfft(out, n=x.size(-1))


class FNO(nn.Module):
    def __init__(self, c=11):
        super().__init__()
        self.fc0 = nn.Linear(2, c)
        self.convs, self.ws = nn.ModuleList([SpectralConv(c, 4) for _ in range(2)]), nn.ModuleList([nn.Conv1d(c, c, 1) for _ in range(2)])
        self.fc1, self.fc2 = nn.Linear(c, 19), nn.Linear(19, 1)

    def forward(self, x):
        x = self.fc0(x).permute(0, 2, 1)
        for s, w in zip(self.convs, self.ws):
            x = F.gelu(s(x) + w(x))
        return self.fc2(F.gelu(self.fc1(x.permute(0, 2, 1))))


add("fno_complex", FNO, lambda: (torch.randn(2, 16, 2),), {
    "fc0.weight": M, "convs.*.weights1": EL, "ws.*.weight": M, "fc1.weight": M, "fc2.weight": OUT})


# ---------------------------------------------------------------- N-BEATS: backcast returns to the stream, forecast leaves, in every block
class NBeatsBlock(nn.Module):
    def __init__(self, back=20, fore=5, h=13):
        super().__init__()
        self.fc = nn.Sequential(nn.Linear(back, h), nn.ReLU(), nn.Linear(h, h), nn.ReLU())
        self.theta_b, self.theta_f = nn.Linear(h, 4, bias=False), nn.Linear(h, 4, bias=False)
        self.backcast_fc, self.forecast_fc = nn.Linear(4, back), nn.Linear(4, fore)

    def forward(self, x):
        h = self.fc(x)
        return self.backcast_fc(F.relu(self.theta_b(h))), self.forecast_fc(F.relu(self.theta_f(h)))


class NBeats(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([NBeatsBlock() for _ in range(3)])

    def forward(self, x):
        fore = torch.zeros(x.size(0), 5, device=x.device)
        for b in self.blocks:
            back, f = b(x)
            x, fore = x - back, fore + f
        return x, fore


add("nbeats", NBeats, lambda: (torch.randn(3, 20),), {
    "*.fc.?.weight": M, "*.theta_?.weight": M,
    "blocks.2.backcast_fc.weight": arg(M),  # the last residual is only returned
    "*.backcast_fc.weight": M, "*.forecast_fc.weight": OUT})


# ---------------------------------------------------------------- KAN with splines; learned grid; last layer is the head
class KANLinear(nn.Module):
    def __init__(self, i, o, g=6):
        super().__init__()
        self.base_weight = nn.Parameter(torch.randn(o, i) * 0.1)
        self.spline_weight = nn.Parameter(torch.randn(o, i, g) * 0.1)
        self.spline_scaler = nn.Parameter(torch.ones(o, i))
        self.centers = nn.Parameter(torch.linspace(-1, 1, g).repeat(i, 1))

    def forward(self, x):
        basis = torch.exp(-((x.unsqueeze(-1) - self.centers) * 2) ** 2)
        w = self.spline_weight * self.spline_scaler.unsqueeze(-1)
        return F.linear(F.silu(x), self.base_weight) + F.linear(basis.flatten(1), w.view(w.size(0), -1))


def kan():
    return nn.Sequential(KANLinear(7, 9), KANLinear(9, 12), KANLinear(12, 2))


add("kan", kan, lambda: (torch.randn(4, 7),), {
    "*.centers": EL, "2.base_weight": OUT, "2.spline_weight": OUT, "2.spline_scaler": arg(EL),
    "*.base_weight": M, "*.spline_weight": M, "*.spline_scaler": arg(EL)})


# ---------------------------------------------------------------- FT-Transformer for tables
class FTTransformer(nn.Module):
    def __init__(self, num=6, cats=(4, 9), d=16):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(num, d)), nn.Parameter(torch.zeros(num + len(cats), d))
        self.cls = nn.Parameter(torch.zeros(1, 1, d))
        self.category_embeddings = nn.ModuleList([nn.Embedding(c, d) for c in cats])
        self.w_qkv = nn.ModuleList([nn.Linear(d, 3 * d, bias=False) for _ in range(2)])
        self.w_out = nn.ModuleList([nn.Linear(d, d, bias=False) for _ in range(2)])
        self.reglu = nn.ModuleList([nn.Linear(d, 2 * 21) for _ in range(2)])
        self.ff_out = nn.ModuleList([nn.Linear(21, d) for _ in range(2)])
        self.last = nn.Linear(d, 1)

    def forward(self, x_num, x_cat):
        t = torch.cat([x_num[..., None] * self.weight, torch.stack([e(x_cat[:, i]) for i, e in enumerate(self.category_embeddings)], 1)], 1) + self.bias
        x = torch.cat([self.cls.repeat(len(t), 1, 1), t], 1)
        for qkv, o, f, fo in zip(self.w_qkv, self.w_out, self.reglu, self.ff_out):
            b, n, d = x.shape
            q, k, v = qkv(F.layer_norm(x, (d,))).reshape(b, n, 3, 2, d // 2).permute(2, 0, 3, 1, 4).unbind(0)
            x = x + o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, n, d))
            a, g = f(x).chunk(2, -1)
            x = x + fo(a * F.relu(g))
        return self.last(F.relu(x[:, 0])).squeeze(-1)


add("ft_transformer", FTTransformer, lambda: (torch.randn(3, 6), torch.tensor([[0, 1], [3, 8], [2, 4]])), {
    "weight": EL, "bias": EL, "cls": EL, "category_embeddings.*.weight": EMB, "w_qkv.*.weight": mat([16] * 3), "w_out.*.weight": M,
    "reglu.*.weight": mat([21, 21]), "ff_out.*.weight": M, "last.weight": OUT})


# ---------------------------------------------------------------- biaffine parser with one bilinear scorer, POS multi-task, tied by hand
class Biaffine(nn.Module):
    def __init__(self, v=55, pos=8, h=14):
        super().__init__()
        self.word, self.tag_table = nn.Embedding(v, 12), nn.Parameter(torch.randn(pos, 12))
        self.lstm = nn.LSTM(12, h, bidirectional=True, batch_first=True)
        self.tagger = nn.Linear(2 * h, pos)
        self.arc_d, self.arc_h = nn.Linear(2 * h, 10), nn.Linear(2 * h, 10)
        self.arc_w = nn.Parameter(torch.randn(11, 10) * 0.1)
        self.rel = nn.Bilinear(10, 10, 6)

    def forward(self, w, tags):
        onehot = F.one_hot(tags, 8).float()
        x = self.lstm(self.word(w) + onehot @ self.tag_table)[0]
        d, h = F.elu(self.arc_d(x)), F.elu(self.arc_h(x))
        d1 = torch.cat([d, torch.ones_like(d[..., :1])], -1)
        arcs = d1 @ self.arc_w @ h.mT
        best = h[torch.arange(len(w))[:, None], arcs.argmax(-1)]
        return arcs, self.rel(d, best), self.tagger(x)


add("biaffine_parser", Biaffine, lambda: (torch.randint(0, 55, (2, 6)), torch.randint(0, 8, (2, 6))), {
    "word.weight": EMB, "tag_table": EMB, "lstm.weight_*": mat([14] * 4), "tagger.weight": OUT, "arc_d.weight": M, "arc_h.weight": M,
    "arc_w": arg(mat(transposed=True)), "rel.weight": OUT})


# ---------------------------------------------------------------- RealNVP: coupling nets modify the stream; log-likelihood
class Coupling(nn.Module):
    def __init__(self, d=10, h=16, flip=False):
        super().__init__()
        self.flip = flip
        self.net = nn.Sequential(nn.Linear(d // 2, h), nn.ReLU(), nn.Linear(h, h), nn.ReLU(), nn.Linear(h, d))
        self.rescale = nn.Parameter(torch.ones(1, d // 2))
        self.mix = nn.utils.parametrizations.orthogonal(nn.Linear(d, d, bias=False))

    def forward(self, x):
        a, b = self.mix(x).chunk(2, 1)
        if self.flip:
            a, b = b, a
        s, t = self.net(a).chunk(2, 1)
        s = torch.tanh(s) * self.rescale
        return torch.cat([a, b * s.exp() + t], 1), s.sum(1)


class RealNVP(nn.Module):
    def __init__(self):
        super().__init__()
        self.couplings = nn.ModuleList([Coupling(flip=bool(i % 2)) for i in range(3)])

    def forward(self, x):
        ld = 0
        for c in self.couplings:
            x, l = c(x)
            ld = ld + l
        return (-0.5 * x.pow(2).sum(1) + ld).mean()


add("realnvp", RealNVP, lambda: (torch.randn(4, 10),), {
    "couplings.*.net.[02].weight": M, "couplings.2.net.4.weight": arg(mat([5, 5])), "couplings.*.net.4.weight": mat([5, 5]), "*.rescale": EL,
    "*.mix.*.original": arg(M)})


# ---------------------------------------------------------------- deep ensemble by functional_call + vmap over stacked copies
class StackedEnsemble(nn.Module):
    def __init__(self, n=3):
        super().__init__()
        base = nn.Sequential(nn.Linear(6, 15), nn.SiLU(), nn.Linear(15, 15), nn.SiLU(), nn.Linear(15, 4))
        object.__setattr__(self, "_base", base.to("meta"))
        self.stacked = nn.ParameterDict({k.replace(".", "_"): nn.Parameter(torch.randn(n, *p.shape) * 0.1) for k, p in base.named_parameters()})
        self.register_buffer("std", torch.ones(6))

    def forward(self, x):
        params = {k.replace("_", "."): v for k, v in self.stacked.items()}
        one = lambda p, t: torch.func.functional_call(self._base, p, (t,))
        return torch.vmap(one, in_dims=(0, None))(params, x / self.std).mean(0)


add("vmap_ensemble", StackedEnsemble, lambda: (torch.randn(5, 6),), {
    "stacked.0_weight": mat(batched=True), "stacked.2_weight": mat(batched=True), "stacked.4_weight": OUT, "stacked.?_bias": EL})


# ---------------------------------------------------------------- no example: plain MLP regressors as people hand them over
class PlainMLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin1, self.lin2, self.lin3, self.lin4 = nn.Linear(13, 64), nn.Linear(64, 48), nn.Linear(48, 48), nn.Linear(48, 1)

    def forward(self, x):
        return self.lin4(F.relu(self.lin3(F.relu(self.lin2(F.relu(self.lin1(x)))))))


add("plain_mlp_no_example", PlainMLP, None, {"lin[123].weight": M, "lin4.weight": OUT})


class SiameseNoExample(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(1, 8, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 12, 5), nn.ReLU(), nn.Flatten(), nn.LazyLinear(33))
        self.net(torch.zeros(1, 1, 20, 20))
        self.fuse = nn.Linear(66, 12)
        self.same = nn.Linear(12, 2)

    def forward(self, a, b):
        return self.same(F.relu(self.fuse(torch.cat([self.net(a), self.net(b)], 1))))


add("siamese_no_example", SiameseNoExample, None, {"net.*.weight": M, "fuse.weight": M, "same.weight": OUT})
