"""Operators, splines, differential equations, fixed points, forces, graphs, flows."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.parametrizations import orthogonal, spectral_norm

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


# --- 29: Fourier neural operator


class SpectralConv2d(nn.Module):
    def __init__(self, c_in, c_out, modes):
        super().__init__()
        self.m, self.c_out = modes, c_out
        scale = 1 / (c_in * c_out)
        self.weights1 = nn.Parameter(scale * torch.rand(c_in, c_out, modes, modes, dtype=torch.cfloat))
        self.weights2 = nn.Parameter(scale * torch.rand(c_in, c_out, modes, modes, dtype=torch.cfloat))

    def forward(self, x):
        b, _, h, w = x.shape
        xf, m = torch.fft.rfft2(x), self.m
        out = torch.zeros(b, self.c_out, h, w // 2 + 1, dtype=torch.cfloat, device=x.device)
        out[:, :, :m, :m] = torch.einsum("bixy,ioxy->boxy", xf[:, :, :m, :m], self.weights1)
        out[:, :, -m:, :m] = torch.einsum("bixy,ioxy->boxy", xf[:, :, -m:, :m], self.weights2)
        return torch.fft.irfft2(out, s=(h, w))


class FNO2d(nn.Module):
    def __init__(self, width=16, modes=3, depth=3):
        super().__init__()
        self.p = nn.Linear(3, width)
        self.spectral = nn.ModuleList(SpectralConv2d(width, width, modes) for _ in range(depth))
        self.local = nn.ModuleList(nn.Conv2d(width, width, 1) for _ in range(depth))
        self.q1, self.q2 = nn.Conv2d(width, 4 * width, 1), nn.Conv2d(4 * width, 1, 1)

    def forward(self, a):
        n = a.shape[1]
        g = torch.linspace(0, 1, n, device=a.device)
        grid = torch.stack(torch.meshgrid(g, g, indexing="ij"), -1).expand(len(a), -1, -1, -1)
        x = self.p(torch.cat([a[..., None], grid], -1)).permute(0, 3, 1, 2)
        for i, (s, w) in enumerate(zip(self.spectral, self.local)):
            x = s(x) + w(x)
            x = F.gelu(x) if i < len(self.spectral) - 1 else x
        return self.q2(F.gelu(self.q1(x))).squeeze(1)


fno_expected = linears("", "p", "q1", *(f"local.{i}" for i in range(3))) | heads("q2")
for i in range(3):
    fno_expected |= elementwise(f"spectral.{i}.", "weights1", "weights2")


# --- 30: Kolmogorov-Arnold network


class KANLayer(nn.Module):
    def __init__(self, fan_in, fan_out, grid=5, order=3):
        super().__init__()
        self.order, self.fan_out = order, fan_out
        h = 2 / grid
        self.register_buffer("grid", (torch.arange(-order, grid + order + 1) * h - 1).expand(fan_in, -1).contiguous())
        self.base_weight = nn.Parameter(torch.randn(fan_out, fan_in) * fan_in**-0.5)
        self.spline_weight = nn.Parameter(torch.randn(fan_out, fan_in, grid + order) * 0.1)
        self.spline_scaler = nn.Parameter(torch.rand(fan_out, fan_in))

    def b_splines(self, x):
        g, x = self.grid, x.unsqueeze(-1)
        b = ((x >= g[:, :-1]) & (x < g[:, 1:])).to(x.dtype)
        for k in range(1, self.order + 1):
            left = (x - g[:, : -(k + 1)]) / (g[:, k:-1] - g[:, : -(k + 1)]) * b[..., :-1]
            right = (g[:, k + 1 :] - x) / (g[:, k + 1 :] - g[:, 1:-k]) * b[..., 1:]
            b = left + right
        return b

    def forward(self, x):
        base = F.linear(F.silu(x), self.base_weight)
        scaled = self.spline_weight * self.spline_scaler.unsqueeze(-1)
        return base + F.linear(self.b_splines(x).flatten(1), scaled.view(self.fan_out, -1))


class KAN(nn.Module):
    def __init__(self, widths=(6, 12, 12, 2)):
        super().__init__()
        self.layers = nn.ModuleList(KANLayer(a, b) for a, b in zip(widths, widths[1:]))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


kan_expected = {}
for i in range(3):
    role = OUT if i == 2 else MAT
    kan_expected |= {
        f"layers.{i}.base_weight": (role, None),
        f"layers.{i}.spline_weight": (role, None),
        f"layers.{i}.spline_scaler": (ELE, None, "arguable"),  # a gain for each edge; a matrix by its shape
    }


# --- 31: neural ODE whose field is made by a hypernetwork, Runge-Kutta in a loop


class HyperField(nn.Module):
    def __init__(self, dim=4, width=6, hidden=20):
        super().__init__()
        self.dim, self.width, self.block = dim, width, dim * width
        self.fc1, self.fc2 = nn.Linear(1, hidden), nn.Linear(hidden, hidden)
        self.fc3 = nn.Linear(hidden, 3 * self.block + width)

    def forward(self, t, z):
        p = self.fc3(torch.tanh(self.fc2(torch.tanh(self.fc1(t.reshape(1, 1)))))).reshape(-1)
        w = p[: self.block].view(self.width, self.dim, 1)
        u = p[self.block : 2 * self.block].view(self.width, 1, self.dim)
        g = p[2 * self.block : 3 * self.block].view(self.width, 1, self.dim)
        b = p[3 * self.block :].view(self.width, 1, 1)
        h = torch.tanh(z.unsqueeze(0) @ w + b)
        return (h @ (u * torch.sigmoid(g))).mean(0)


class LatentODE(nn.Module):
    """Forecasts: a GRU encodes, reparametrizes, the field is integrated, an MLP decodes."""

    def __init__(self, obs=3, dim=4):
        super().__init__()
        self.rnn = nn.GRU(obs, 16, batch_first=True)
        self.to_latent = nn.Linear(16, 2 * dim)
        self.field = HyperField(dim)
        self.decoder = nn.Sequential(nn.Linear(dim, 16), nn.ReLU(), nn.Linear(16, obs))

    def forward(self, x, steps=4):
        mean, logvar = self.to_latent(self.rnn(x)[1][-1]).chunk(2, -1)
        z = mean + torch.randn_like(mean) * (0.5 * logvar).exp()
        traj, h = [z], 1.0 / steps
        for i in range(steps):
            t = torch.full((), i * h, device=x.device)
            k1 = self.field(t, z)
            k2 = self.field(t + h / 2, z + h / 2 * k1)
            k3 = self.field(t + h / 2, z + h / 2 * k2)
            k4 = self.field(t + h, z + h * k3)
            z = z + h / 6 * (k1 + 2 * k2 + 2 * k3 + k4)
            traj.append(z)
        kl = 0.5 * (mean**2 + logvar.exp() - 1 - logvar).sum(-1).mean()
        return self.decoder(torch.stack(traj, 1)), kl


ode_expected = elementwise("", "rnn.bias_ih_l0", "rnn.bias_hh_l0", "to_latent.bias", "field.fc1.bias", "field.fc3.bias")
ode_expected |= linears("", "field.fc2", "decoder.0") | heads("decoder.2") | {
    "rnn.weight_ih_l0": (MAT, split(16, 16, 16)),
    "rnn.weight_hh_l0": (MAT, split(16, 16, 16)),
    "to_latent.weight": (MAT, split(4, 4)),
    "field.fc1.weight": (MAT, None, "arguable"),  # one column: a matrix, or too thin for one
    "field.fc3.weight": (MAT, split(24, 24, 24, 6), "arguable"),  # generated weights: split, or one matrix
}


# --- 32: deep equilibrium model: solved without gradient, one step with it; spectral norm inside the loop


class Cell(nn.Module):
    def __init__(self, dim, hidden):
        super().__init__()
        self.inject = nn.Linear(dim, hidden, bias=False)
        self.W = spectral_norm(nn.Linear(dim, hidden, bias=False))
        self.U = nn.Linear(hidden, dim)
        self.norm = nn.LayerNorm(dim)

    def forward(self, z, x):
        return self.norm(0.5 * z + self.U(torch.relu(self.W(z) + self.inject(x))) + x)


class DEQ(nn.Module):
    def __init__(self, dim=20, iters=8):
        super().__init__()
        self.iters = iters
        self.encode = nn.Sequential(nn.Linear(9, dim), nn.Tanh())
        self.cell = Cell(dim, 32)
        self.readout = nn.Linear(dim, 1)

    def forward(self, x):
        x = self.encode(x)
        z = torch.zeros_like(x)
        with torch.no_grad():
            for _ in range(self.iters):
                new = self.cell(z, x)
                if (new - z).norm().item() < 1e-4:
                    break
                z = new
        z = self.cell(z.detach(), x)
        if self.training and z.requires_grad:
            z0 = z.detach().requires_grad_()
            f0 = self.cell(z0, x.detach())

            def backward_hook(grad):
                g = grad
                for _ in range(4):
                    g = torch.autograd.grad(f0, z0, g, retain_graph=True)[0] + grad
                return g

            z.register_hook(backward_hook)
        return self.readout(z).squeeze(-1)


deq_expected = linears("", "encode.0", "cell.U") | matrices("", "cell.inject.weight") | norm("cell.norm")
deq_expected |= matrices("", "cell.W.parametrizations.weight.original") | heads("readout")
