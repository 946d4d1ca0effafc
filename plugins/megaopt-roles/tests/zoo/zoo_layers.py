"""Unusual layers, adapters and experts, and what each of their parameters is."""

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


class KANLinear(nn.Module):
    def __init__(self, cin: int, cout: int, grid: int = 3) -> None:
        super().__init__()
        self.base_weight = nn.Parameter(torch.zeros(cout, cin))
        self.spline_weight = nn.Parameter(torch.zeros(cout, cin, grid))
        self.spline_scaler = nn.Parameter(torch.zeros(cout, cin))
        self.register_buffer("grid", torch.zeros(cin, grid))
        self.out_features = cout

    def b_splines(self, x: torch.Tensor) -> torch.Tensor:
        return torch.exp(-((x.unsqueeze(-1) - self.grid) ** 2))

    @property
    def scaled_spline_weight(self) -> torch.Tensor:
        return self.spline_weight * self.spline_scaler.unsqueeze(-1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        base = F.linear(F.silu(x), self.base_weight)
        spline = F.linear(
            self.b_splines(x).view(x.size(0), -1), self.scaled_spline_weight.view(self.out_features, -1)
        )
        return base + spline


class KAN(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([KANLinear(6, 8), KANLinear(8, 8), nn.Linear(8, 3)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class HyperNetwork(nn.Module):
    """Makes the weights of another layer; z is a learned code per layer."""

    def __init__(self, z: int = 4, cin: int = 8, cout: int = 8) -> None:
        super().__init__()
        self.z = nn.Parameter(torch.zeros(2, z))
        self.w1, self.b1 = nn.Parameter(torch.zeros(z, 16)), nn.Parameter(torch.zeros(16))
        self.w2 = nn.Parameter(torch.zeros(16, cin * cout))
        self.inp, self.out = nn.Linear(5, cin), nn.Linear(cout, 3)
        self.cin, self.cout = cin, cout

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inp(x)
        for i in range(2):
            h = torch.tanh(torch.matmul(self.z[i], self.w1) + self.b1)
            kernel = torch.matmul(h, self.w2).view(self.cout, self.cin)
            x = F.relu(F.linear(x, kernel))
        return self.out(x)


class DoRALinear(nn.Module):
    def __init__(self, cin: int = 8, cout: int = 8, rank: int = 2) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(cout, cin), requires_grad=False)
        self.m = nn.Parameter(torch.ones(1, cout))
        self.lora_A = nn.Parameter(torch.zeros(rank, cin))
        self.lora_B = nn.Parameter(torch.zeros(cout, rank))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        adapted = self.weight + self.lora_B @ self.lora_A
        return F.linear(x, (adapted / adapted.norm(dim=1, keepdim=True)) * self.m.T)


class LoRAWrapped(nn.Module):
    def __init__(self, linear: nn.Linear, rank: int = 2, alpha: int = 4) -> None:
        super().__init__()
        self.linear = linear
        self.A = nn.Parameter(torch.zeros(linear.in_features, rank))
        self.B = nn.Parameter(torch.zeros(rank, linear.out_features))
        self.alpha = alpha

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) + self.alpha * (x @ self.A @ self.B)


class TernaryLinear(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        w = self.weight
        scale = 1.0 / w.abs().mean().clamp_(min=1e-5)
        quantized = (w * scale).round().clamp_(-1, 1) / scale
        w = w + (quantized - w).detach()
        return F.linear(x, w)


class Tuned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tok = nn.Embedding(30, 8)
        self.dora, self.lora, self.bit = DoRALinear(), LoRAWrapped(nn.Linear(8, 8)), TernaryLinear(8, 8)
        self.curvature = nn.Parameter(torch.tensor(1.0))
        self.head = nn.Linear(8, 30)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.bit(F.relu(self.lora(F.relu(self.dora(self.tok(ids))))))
        x = torch.tanh(self.curvature.sqrt() * x) / self.curvature.sqrt()
        return self.head(x)


class FlatExperts(nn.Module):
    """All experts of a layer in one 2-D weight, cut by view."""

    def __init__(self, experts: int = 4, ffn: int = 6, d: int = 8) -> None:
        super().__init__()
        self.experts, self.ffn, self.d = experts, ffn, d
        self.router = nn.Linear(d, experts, bias=False)
        self.w1 = nn.Parameter(torch.zeros(experts * ffn, d))
        self.v1 = nn.Parameter(torch.zeros(experts * ffn, d))
        self.w2 = nn.Parameter(torch.zeros(experts * ffn, d))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, top = self.router(x).softmax(-1).topk(2, dim=-1)
        w1 = self.w1.view(self.experts, self.ffn, self.d)
        v1 = self.v1.view(self.experts, self.ffn, self.d)
        w2 = self.w2.view(self.experts, self.ffn, self.d)
        out = torch.zeros_like(x)
        for e in range(self.experts):
            rows, k = torch.where(top == e)
            tokens = x[rows]
            hidden = F.silu(tokens.matmul(w1[e].t())) * tokens.matmul(v1[e].t())
            out.index_add_(0, rows, hidden.matmul(w2[e]) * weights[rows, k, None])
        return out


class GroupedExperts(nn.Module):
    def __init__(self, experts: int = 4, d: int = 8, hidden: int = 16) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.zeros(experts, hidden, d))
        self.w2 = nn.Parameter(torch.zeros(experts, d, hidden))
        self.w3 = nn.Parameter(torch.zeros(experts, hidden, d))

    def forward(self, x: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        offsets = torch.cumsum(counts, dim=0, dtype=torch.int32)
        h = F.silu(torch._grouped_mm(x.bfloat16(), self.w1.bfloat16().transpose(-2, -1), offs=offsets))
        h = h * torch._grouped_mm(x.bfloat16(), self.w3.bfloat16().transpose(-2, -1), offs=offsets)
        return torch._grouped_mm(h, self.w2.bfloat16().transpose(-2, -1), offs=offsets).type_as(x)


class SwitchLayer(nn.Module):
    """Experts as modules in a dictionary, the router as a bare weight."""

    def __init__(self, experts: int = 3, d: int = 8) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.zeros(d, experts))
        self.experts = nn.ModuleDict(
            {
                f"expert_{i}": nn.Sequential(nn.Linear(d, 12), nn.ReLU(), nn.Linear(12, d))
                for i in range(experts)
            }
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        probs = F.softmax(x @ self.gate, dim=-1)
        index = probs.argmax(-1)
        out = x.clone()
        for i, expert in enumerate(self.experts.values()):
            out[index == i] = expert(x[index == i])
        return out * probs.max(-1, keepdim=True).values


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tok = nn.Embedding(30, 8)
        self.flat, self.grouped, self.switch = FlatExperts(), GroupedExperts(), SwitchLayer()
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 30)

    def forward(self, ids: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        x = self.tok(ids).flatten(0, 1)
        x = x + self.flat(x)
        x = x + self.grouped(x, counts)
        x = x + self.switch(x)
        return self.head(self.norm(x))


EXPECTED = {
    "splines": (
        KAN,
        {
            **{f"layers.{i}.base_weight": M for i in range(2)},
            **{f"layers.{i}.spline_weight": M for i in range(2)},
            **{f"layers.{i}.spline_scaler": X for i in range(2)},
            "layers.2.weight": O,
        },
    ),
    "hypernetwork": (
        HyperNetwork,
        {"z": X, "w1": T, "w2": T, "inp.weight": M, "out.weight": O},
    ),
    "hand-written adapters": (
        Tuned,
        {
            "tok.weight": E,
            "dora.weight": M,
            "dora.m": X,
            "dora.lora_A": M,
            "dora.lora_B": M,
            "lora.linear.weight": M,
            "lora.A": T,
            "lora.B": T,
            "bit.weight": M,
            "head.weight": O,
        },
    ),
    "expert layouts": (
        Mixture,
        {
            "tok.weight": E,
            "flat.router.weight": M,
            "flat.w1": split(6, 6, 6, 6, label="blocks"),
            "flat.v1": split(6, 6, 6, 6, label="blocks"),
            "flat.w2": split(6, 6, 6, 6, transposed=True, split_dim=1, label="blocks"),
            **{f"grouped.w{i}": MatrixView(batch_dims=1) for i in (1, 2, 3)},
            "switch.gate": T,
            **{f"switch.experts.expert_{i}.{j}.weight": M for i in range(3) for j in (0, 2)},
            "head.weight": O,
        },
    ),
}
