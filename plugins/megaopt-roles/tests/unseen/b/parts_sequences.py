"""World models, recommenders, speech, time series."""

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

EMB, OUT, MAT, ELE = "embedding", "output", "matrix", "elementwise"


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


# --- 36: a recurrent state-space world model (Dreamer)


class RSSM(nn.Module):
    def __init__(self, act=3, deter=32, groups=4, classes=5, hidden=24, embed=20):
        super().__init__()
        self.g, self.c, self.deter = groups, classes, deter
        stoch = groups * classes
        self.img_in = nn.Sequential(nn.Linear(stoch + act, hidden), nn.LayerNorm(hidden), nn.SiLU())
        self.cell = nn.GRUCell(hidden, deter)
        self.prior = nn.Sequential(nn.Linear(deter, hidden), nn.SiLU(), nn.Linear(hidden, stoch))
        self.posterior = nn.Sequential(nn.Linear(deter + embed, hidden), nn.SiLU(), nn.Linear(hidden, stoch))

    def sample(self, logits):
        p = logits.unflatten(-1, (self.g, self.c)).softmax(-1)
        hard = F.one_hot(p.argmax(-1), self.c).to(p.dtype)
        return (hard + p - p.detach()).flatten(-2)

    def forward(self, embed, actions):
        b, t, _ = embed.shape
        h, z = embed.new_zeros(b, self.deter), embed.new_zeros(b, self.g * self.c)
        feats, kl = [], 0.0
        for i in range(t):
            h = self.cell(self.img_in(torch.cat([z, actions[:, i]], -1)), h)
            prior, post = self.prior(h), self.posterior(torch.cat([h, embed[:, i]], -1))
            z = self.sample(post)
            pl, ql = (v.unflatten(-1, (self.g, self.c)).log_softmax(-1) for v in (prior, post))
            kl = kl + (ql.exp() * (ql - pl)).sum((-1, -2)).mean()
            feats.append(torch.cat([h, z], -1))
        return torch.stack(feats, 1), kl / t


def head(dim, out):
    return nn.Sequential(nn.Linear(dim, 24), nn.SiLU(), nn.Linear(24, out))


class WorldModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Conv2d(1, 8, 4, 2, 1), nn.ELU(), nn.Conv2d(8, 12, 4, 2, 1), nn.ELU(), nn.Flatten(), nn.Linear(48, 20))
        self.rssm = RSSM()
        self.heads = nn.ModuleDict({"reward": head(52, 9), "cont": head(52, 1)})
        self.actor, self.critic = head(52, 6), head(52, 1)
        self.dec_in = nn.Linear(52, 48)
        self.decoder = nn.Sequential(nn.ConvTranspose2d(12, 8, 4, 2, 1), nn.ELU(), nn.ConvTranspose2d(8, 1, 4, 2, 1))

    def forward(self, obs, actions):
        b = obs.shape[0]
        e = rearrange(self.encoder(obs.flatten(0, 1)), "(b t) d -> b t d", b=b)
        feat, kl = self.rssm(e, actions)
        recon = self.decoder(self.dec_in(feat).view(-1, 12, 2, 2)).unflatten(0, (b, -1))
        out = {name: module(feat) for name, module in self.heads.items()}
        mean, std = self.actor(feat.detach()).chunk(2, -1)
        return out | dict(recon=recon, kl=kl, mean=mean, std=F.softplus(std), value=self.critic(feat.detach()))


world_expected = linears("", "encoder.0", "encoder.2", "encoder.5", "dec_in", "actor.0", "critic.0", "heads.reward.0", "heads.cont.0")
world_expected |= heads("actor.2", "critic.2", "heads.reward.2", "heads.cont.2", "decoder.2")
world_expected |= linears("rssm.", "img_in.0", "prior.0", "posterior.0", "posterior.2") | norm("rssm.img_in.1")
world_expected |= elementwise("", "rssm.cell.bias_ih", "rssm.cell.bias_hh", "rssm.prior.2.bias", "decoder.0.bias") | {
    "rssm.cell.weight_ih": (MAT, split(32, 32, 32)),
    "rssm.cell.weight_hh": (MAT, split(32, 32, 32)),
    # only a loss takes the prior: a head, or hidden
    "rssm.prior.2.weight": (OUT, None, "arguable"),
    "decoder.0.weight": (MAT, dict(transposed=True), "arguable"),  # [in, out, k, k]; a convolution may stay unturned
}


# --- 37: a recommender: bags, factorization, low-rank crosses with experts, several tasks


class CrossMix(nn.Module):
    def __init__(self, dim, rank=6, experts=2):
        super().__init__()
        self.U = nn.Parameter(torch.randn(experts, dim, rank) * 0.1)
        self.Vt = nn.Parameter(torch.randn(experts, dim, rank) * 0.1)
        self.C = nn.Parameter(torch.randn(experts, rank, rank) * 0.3)
        self.gate = nn.Linear(dim, experts, bias=False)
        self.bias = nn.Parameter(torch.zeros(dim, 1))

    def forward(self, x0, x):
        v = torch.tanh(torch.einsum("bd,edr->ber", x, self.Vt))
        v = torch.tanh(torch.einsum("ber,eqr->beq", v, self.C))
        u = torch.einsum("beq,edq->bed", v, self.U) + self.bias.squeeze(-1)
        return x + torch.einsum("be,bed->bd", self.gate(x).softmax(-1), x0[:, None] * u)


class Recommender(nn.Module):
    def __init__(self, sizes=(31, 17, 23), dim=8, dense=5):
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(n, dim, mode="mean") for n in sizes)
        self.linear_terms = nn.ModuleList(nn.Embedding(n, 1) for n in sizes)
        self.bottom = nn.Sequential(nn.Linear(dense, 16), nn.ReLU(), nn.Linear(16, dim))
        width = dim * (len(sizes) + 1)
        self.cross = nn.ModuleList(CrossMix(width) for _ in range(2))
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(width, 16), nn.ReLU()) for _ in range(3))
        self.task_gates = nn.ModuleList(nn.Linear(width, 3, bias=False) for _ in range(2))
        self.towers = nn.ModuleDict({t: nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 1)) for t in ("click", "buy")})
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, dense, ids):
        e = torch.stack([t(ids[:, i : i + 1]) for i, t in enumerate(self.tables)] + [self.bottom(dense)], 1)
        fm = 0.5 * (e.sum(1).pow(2) - e.pow(2).sum(1)).sum(-1, keepdim=True)
        wide = sum(t(ids[:, i]) for i, t in enumerate(self.linear_terms))
        x0 = x = e.flatten(1)
        for c in self.cross:
            x = c(x0, x)
        stack = torch.stack([m(x) for m in self.experts], 1)
        out = {}
        for gate, (task, tower) in zip(self.task_gates, self.towers.items()):
            mixed = (gate(x).softmax(-1).unsqueeze(-1) * stack).sum(1)
            out[task] = torch.sigmoid(tower(mixed) + wide + fm + self.bias)
        return out


rec_expected = linears("", "bottom.0", "bottom.2", "experts.0.0", "experts.1.0", "experts.2.0", "towers.click.0", "towers.buy.0")
rec_expected |= heads("towers.click.2", "towers.buy.2") | matrices("", "task_gates.0.weight", "task_gates.1.weight")
rec_expected |= {f"{t}.{i}.weight": (EMB, None) for t in ("tables", "linear_terms") for i in range(3)} | {"bias": (ELE, None)}
for i in range(2):
    p = f"cross.{i}."
    rec_expected |= {
        p + "U": (MAT, dict(batched=True)),
        p + "Vt": (MAT, dict(batched=True, transposed=True)),
        p + "C": (MAT, dict(batched=True)),
        p + "gate.weight": (MAT, None),
        p + "bias": (ELE, None),
    }
