"""Operators, splines, differential equations, fixed points, forces, graphs, flows."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.parametrizations import orthogonal, spectral_norm

from parts_science import *


# --- 33: an energy of atoms; forces by autograd.grad inside the forward


class CFConv(nn.Module):
    def __init__(self, dim=16, rbf=10):
        super().__init__()
        self.filter = nn.Sequential(nn.Linear(rbf, dim), nn.Softplus(), nn.Linear(dim, dim))
        self.lin1, self.lin2 = nn.Linear(dim, dim, bias=False), nn.Linear(dim, dim)
        self.out = nn.Linear(dim, dim)

    def forward(self, h, rbf, src, dst):
        msg = self.lin1(h)[src] * self.filter(rbf)
        agg = torch.zeros_like(h).index_add(0, dst, msg)
        return h + self.out(F.softplus(self.lin2(agg)))


class EnergyForces(nn.Module):
    def __init__(self, dim=16):
        super().__init__()
        self.atoms = nn.Embedding(10, dim)
        self.shift = nn.Embedding(10, 1)
        self.register_buffer("centers", torch.linspace(0, 5, 10))
        self.width = nn.Parameter(torch.tensor(1.0))
        self.interactions = nn.ModuleList(CFConv(dim) for _ in range(3))
        self.energy = nn.Sequential(nn.Linear(dim, 8), nn.Softplus(), nn.Linear(8, 1))

    def forward(self, z, pos, edge_index):
        with torch.enable_grad():
            pos = pos.detach().requires_grad_()
            src, dst = edge_index
            dist = (pos[src] - pos[dst]).pow(2).sum(-1).add(1e-6).sqrt()
            rbf = torch.exp(-self.width * (dist[:, None] - self.centers) ** 2)
            h = self.atoms(z)
            for layer in self.interactions:
                h = layer(h, rbf, src, dst)
            e = (self.energy(h) + self.shift(z)).sum()
            forces = -torch.autograd.grad(e, pos, create_graph=True)[0]
        return {"energy": e, "forces": forces}


energy_expected = {"atoms.weight": (EMB, None), "shift.weight": (EMB, None), "width": (ELE, None)}
energy_expected |= linears("", "energy.0") | heads("energy.2")
for i in range(3):
    p = f"interactions.{i}."
    energy_expected |= linears(p, "filter.0", "filter.2", "lin2", "out") | matrices(p, "lin1.weight")


# --- 34: graphs: relations by bases, attention with vectors, positions of edges; node and graph targets


class RelationalConv(nn.Module):
    def __init__(self, fan_in, fan_out, relations=3, bases=2):
        super().__init__()
        self.bases = nn.Parameter(torch.randn(bases, fan_in, fan_out) * fan_in**-0.5)
        self.comp = nn.Parameter(torch.randn(relations, bases))
        self.root = nn.Parameter(torch.randn(fan_in, fan_out) * fan_in**-0.5)
        self.bias = nn.Parameter(torch.zeros(fan_out))

    def forward(self, x, src, dst, rel):
        weight = torch.einsum("rb,bio->rio", self.comp, self.bases)
        out = x @ self.root + self.bias
        for r in range(self.comp.shape[0]):
            m = (x @ weight[r])[src] * (rel == r)[:, None].to(x.dtype)
            out = out.index_add(0, dst, m)
        return F.relu(out)


class GATLayer(nn.Module):
    def __init__(self, dim, heads=2):
        super().__init__()
        self.h = heads
        self.lin = nn.Linear(dim, dim, bias=False)
        self.att_src = nn.Parameter(torch.randn(1, heads, dim // heads) * 0.3)
        self.att_dst = nn.Parameter(torch.randn(1, heads, dim // heads) * 0.3)
        self.bias = nn.Parameter(torch.zeros(dim))

    def forward(self, x, src, dst):
        h = self.lin(x).view(len(x), self.h, -1)
        a = F.leaky_relu((h * self.att_src).sum(-1)[src] + (h * self.att_dst).sum(-1)[dst], 0.2).exp()
        den = torch.zeros(len(x), self.h, device=x.device).index_add(0, dst, a)
        msg = h[src] * (a / (den[dst] + 1e-6))[..., None]
        return torch.zeros_like(h).index_add(0, dst, msg).flatten(1) + self.bias + x


class GraphModel(nn.Module):
    def __init__(self, dim=16):
        super().__init__()
        self.node_in = nn.Linear(5, dim)
        self.bond = nn.Embedding(3, dim)
        self.conv = RelationalConv(dim, dim)
        self.gat = nn.ModuleList(GATLayer(dim) for _ in range(2))
        self.edge_mlp = nn.Sequential(nn.Linear(3 * dim, dim), nn.ReLU(), nn.Linear(dim, dim))
        self.gate = nn.Linear(dim, 1)
        self.node_out, self.graph_out = nn.Linear(dim, 4), nn.Sequential(nn.Linear(dim, dim), nn.ReLU(), nn.Linear(dim, 2))

    def forward(self, x, edge_index, rel):
        src, dst = edge_index
        h = self.conv(self.node_in(x), src, dst, rel)
        m = self.edge_mlp(torch.cat([h[src], h[dst], self.bond(rel)], -1))
        h = h.index_add(0, dst, m)
        for layer in self.gat:
            h = layer(F.elu(h), src, dst)
        pooled = (h * self.gate(h).softmax(0)).sum(0)
        return self.node_out(h), self.graph_out(pooled)


graph_expected = linears("", "node_in", "edge_mlp.0", "edge_mlp.2", "graph_out.0") | heads("node_out", "graph_out.2")
graph_expected |= {"bond.weight": (EMB, None), "conv.bias": (ELE, None), "gate.bias": (ELE, None)}
graph_expected |= {
    "gate.weight": (MAT, None, "arguable"),  # one row: a matrix, or too thin for one
    "conv.bases": (MAT, dict(batched=True, transposed=True)),
    "conv.comp": (ELE, None, "arguable"),  # coefficients of a mix; contracted, though with no activations
    "conv.root": (MAT, dict(transposed=True)),
}
for i in range(2):
    graph_expected |= elementwise(f"gat.{i}.", "att_src", "att_dst", "bias") | matrices(f"gat.{i}.", "lin.weight")


# --- 35: a flow: activation norm, an orthogonal and a free mixing, couplings, a masked autoregressive layer


class MaskedLinear(nn.Linear):
    def __init__(self, fan_in, fan_out, mask):
        super().__init__(fan_in, fan_out)
        self.register_buffer("mask", mask)

    def forward(self, x):
        return F.linear(x, self.weight * self.mask, self.bias)


class ActNorm(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.log_scale, self.loc = nn.Parameter(torch.zeros(1, d)), nn.Parameter(torch.zeros(1, d))

    def forward(self, x):
        return x * self.log_scale.exp() + self.loc, self.log_scale.sum()


class Coupling(nn.Module):
    def __init__(self, d, hidden=24):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(d // 2, hidden), nn.SiLU(), nn.Linear(hidden, hidden), nn.SiLU(), nn.Linear(hidden, d))

    def forward(self, x):
        a, b = x.chunk(2, -1)
        log_s, t = self.net(a).chunk(2, -1)
        s = torch.sigmoid(log_s + 2)
        return torch.cat([a, b * s + t], -1), s.log().sum(-1)


class FlowStep(nn.Module):
    def __init__(self, d, free):
        super().__init__()
        self.norm = ActNorm(d)
        self.mix = nn.Linear(d, d, bias=False) if free else orthogonal(nn.Linear(d, d, bias=False))
        self.free = free
        self.coupling = Coupling(d)

    def forward(self, x):
        x, ld = self.norm(x)
        x = self.mix(x)
        if self.free:
            ld = ld + torch.linalg.slogdet(self.mix.weight)[1]
        x, ld2 = self.coupling(x)
        return x, ld + ld2


class Flow(nn.Module):
    def __init__(self, d=8, hidden=24):
        super().__init__()
        self.steps = nn.ModuleList([FlowStep(d, False), FlowStep(d, True)])
        deg_in, deg_h = torch.arange(d), torch.arange(hidden) % (d - 1)
        self.made_in = MaskedLinear(d, hidden, (deg_h[:, None] >= deg_in[None]).float())
        self.made_out = MaskedLinear(hidden, 2 * d, (deg_in.repeat(2)[:, None] > deg_h[None]).float())

    def forward(self, x):
        total = 0
        for step in self.steps:
            x, ld = step(x)
            total = total + ld
        mu, log_sigma = self.made_out(torch.relu(self.made_in(x))).chunk(2, -1)
        z = (x - mu) * torch.exp(-log_sigma)
        total = total - log_sigma.sum(-1)
        return (-0.5 * z.pow(2).sum(-1) + total).neg().mean()


flow_expected = linears("", "made_in") | {
    # shift and scale of the stream that leaves: hidden, or a head
    "made_out.weight": (MAT, split(8, 8), "arguable"),
    "made_out.bias": (ELE, None),
}
for i in range(2):
    p = f"steps.{i}."
    flow_expected |= elementwise(p, "norm.log_scale", "norm.loc", "coupling.net.4.bias")
    flow_expected |= linears(p, "coupling.net.0", "coupling.net.2")
    flow_expected[p + "coupling.net.4.weight"] = (MAT, split(4, 4))
flow_expected |= matrices("", "steps.0.mix.parametrizations.weight.original", "steps.1.mix.weight")


def edges(nodes, count):
    src = torch.randint(0, nodes, (count,))
    return torch.stack([src, (src + torch.randint(1, nodes, (count,))) % nodes])


MODELS = [
    ("fno_complex", FNO2d, lambda: (torch.randn(2, 12, 12),), fno_expected),
    ("kan_splines", KAN, lambda: (torch.rand(16, 6) * 1.8 - 0.9,), kan_expected),
    ("latent_ode_hypernetwork", LatentODE, lambda: {"x": torch.randn(3, 6, 3)}, ode_expected),
    ("deq_fixed_point", DEQ, lambda: (torch.randn(4, 9),), deq_expected),
    ("schnet_forces", EnergyForces, lambda: (torch.randint(0, 10, (7,)), torch.randn(7, 3), edges(7, 20)), energy_expected),
    ("graph_relations", GraphModel, lambda: (torch.randn(8, 5), edges(8, 24), torch.randint(0, 3, (24,))), graph_expected),
    ("flow_masked", Flow, lambda: (torch.randn(6, 8),), flow_expected),
]
