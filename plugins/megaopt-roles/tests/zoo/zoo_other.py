"""Recommenders, agents, graphs and time series, and what each of their parameters is."""

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


class DeepFM(nn.Module):
    def __init__(self, fields: tuple[int, ...] = (10, 12), k: int = 4) -> None:
        super().__init__()
        self.first_order = nn.ModuleList([nn.Embedding(n, 1) for n in fields])
        self.second_order = nn.ModuleList([nn.Embedding(n, k) for n in fields])
        self.dense_linear = nn.Linear(3, 1)
        self.dnn = nn.Sequential(nn.Linear(3 + k * len(fields), 16), nn.ReLU(), nn.Linear(16, 8), nn.ReLU())
        self.dnn_out = nn.Linear(8, 1)

    def forward(self, dense: torch.Tensor, sparse: torch.Tensor) -> torch.Tensor:
        first = torch.cat([table(sparse[:, i]) for i, table in enumerate(self.first_order)], dim=1).sum(
            1, keepdim=True
        )
        first = first + self.dense_linear(dense)
        vectors = torch.stack([table(sparse[:, i]) for i, table in enumerate(self.second_order)], dim=1)
        second = 0.5 * (vectors.sum(1).pow(2) - vectors.pow(2).sum(1)).sum(1, keepdim=True)
        deep = self.dnn_out(self.dnn(torch.cat([dense, vectors.flatten(1)], dim=1)))
        return torch.sigmoid(first + second + deep)


class DLRM(nn.Module):
    def __init__(self, rows: tuple[int, ...] = (10, 20), d: int = 4) -> None:
        super().__init__()
        self.emb_l = nn.ModuleList([nn.EmbeddingBag(n, d, mode="sum") for n in rows])
        self.bot_l = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, d), nn.ReLU())
        self.top_l = nn.Sequential(nn.Linear(d + 3, 8), nn.ReLU(), nn.Linear(8, 1), nn.Sigmoid())

    def forward(self, dense: torch.Tensor, offsets: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        x = self.bot_l(dense)
        ly = [emb(indices[k], offsets[k]) for k, emb in enumerate(self.emb_l)]
        t = torch.cat([x, *ly], dim=1).view(x.size(0), -1, x.size(1))
        z = torch.bmm(t, torch.transpose(t, 1, 2))
        li, lj = torch.tril_indices(3, 3, offset=-1)
        return self.top_l(torch.cat([x, z[:, li, lj]], dim=1))


class Cross(nn.Module):
    """A cross network of low rank with experts, and a bare vector per layer."""

    def __init__(self, d: int = 8, rank: int = 2, experts: int = 3) -> None:
        super().__init__()
        self.U = nn.ParameterList([nn.Parameter(torch.zeros(experts, d, rank)) for _ in range(2)])
        self.V = nn.ParameterList([nn.Parameter(torch.zeros(experts, d, rank)) for _ in range(2)])
        self.bias = nn.ParameterList([nn.Parameter(torch.zeros(d, 1)) for _ in range(2)])
        self.gating = nn.ModuleList([nn.Linear(d, 1, bias=False) for _ in range(experts)])
        self.head = nn.Linear(d, 1)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        x_0 = inputs.unsqueeze(2)
        x_l = x_0
        for i in range(2):
            outputs, gates = [], []
            for e in range(3):
                gates.append(self.gating[e](x_l.squeeze(2)))
                v_x = torch.tanh(torch.matmul(self.V[i][e].t(), x_l))
                outputs.append((x_0 * (torch.matmul(self.U[i][e], v_x) + self.bias[i])).squeeze(2))
            moe = torch.matmul(torch.stack(outputs, 2), torch.stack(gates, 1).softmax(1))
            x_l = moe + x_l
        return torch.sigmoid(self.head(x_l.squeeze(2)))


class TwoTower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.user = nn.Sequential(nn.Embedding(10, 8), nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 6))
        self.item = nn.Sequential(nn.Embedding(20, 8), nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 6))

    def forward(self, users: torch.Tensor, items: torch.Tensor) -> torch.Tensor:
        return (F.normalize(self.user(users), dim=-1) * F.normalize(self.item(items), dim=-1)).sum(-1)


class Dueling(nn.Module):
    def __init__(self, actions: int = 4) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(4, 8, 8, 4), nn.ReLU(), nn.Conv2d(8, 8, 4, 2), nn.ReLU(), nn.Flatten()
        )
        self.value = nn.Sequential(nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 1))
        self.advantage = nn.Sequential(nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, actions))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.features(x)
        value, advantage = self.value(x), self.advantage(x)
        return value + advantage - advantage.mean(dim=1, keepdim=True)


class SoftActorCritic(nn.Module):
    """No forward of its own: the algorithm calls its parts."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU())
        self.mean, self.log_std = nn.Linear(16, 2), nn.Linear(16, 2)
        self.q1 = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
        self.q2 = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))

    def act(self, obs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = self.trunk(obs)
        mean, log_std = self.mean(h), self.log_std(h).clamp(-20, 2)
        action = mean + log_std.exp() * torch.randn_like(mean)
        return torch.tanh(action), log_std

    def evaluate(self, obs: torch.Tensor, action: torch.Tensor) -> torch.Tensor:
        x = torch.cat([obs, action], dim=-1)
        return torch.min(self.q1(x), self.q2(x))


class GraphAttention(nn.Module):
    def __init__(self, cin: int = 8, cout: int = 4, heads: int = 2) -> None:
        super().__init__()
        self.heads, self.cout = heads, cout
        self.lin = nn.Linear(cin, heads * cout, bias=False)
        self.att_src = nn.Parameter(torch.zeros(1, heads, cout))
        self.att_dst = nn.Parameter(torch.zeros(1, heads, cout))
        self.bias = nn.Parameter(torch.zeros(heads * cout))

    def forward(self, x: torch.Tensor, edge_index: torch.Tensor) -> torch.Tensor:
        src, dst = edge_index
        h = self.lin(x).view(-1, self.heads, self.cout)
        alpha = (h * self.att_src).sum(-1)[src] + (h * self.att_dst).sum(-1)[dst]
        alpha = F.leaky_relu(alpha, 0.2).exp()
        out = torch.zeros_like(h).index_add(0, dst, h[src] * alpha.unsqueeze(-1))
        return out.flatten(1) + self.bias


class BareGraphAttention(nn.Module):
    def __init__(self, cin: int, cout: int) -> None:
        super().__init__()
        self.W = nn.Parameter(torch.zeros(cin, cout))
        self.a = nn.Parameter(torch.zeros(2 * cout, 1))
        self.cout = cout

    def forward(self, h: torch.Tensor, adj: torch.Tensor) -> torch.Tensor:
        wh = torch.mm(h, self.W)
        e = torch.matmul(wh, self.a[: self.cout, :]) + torch.matmul(wh, self.a[self.cout :, :]).T
        attention = torch.where(adj > 0, F.leaky_relu(e), torch.full_like(e, -9e15))
        return F.elu(torch.matmul(F.softmax(attention, dim=1), wh))


class GraphNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.atoms = nn.Embedding(20, 8)
        self.conv1, self.conv2 = GraphAttention(), BareGraphAttention(8, 8)
        self.lin = nn.Linear(8, 3)

    def forward(self, z: torch.Tensor, edge_index: torch.Tensor, adj: torch.Tensor) -> torch.Tensor:
        x = F.elu(self.conv1(self.atoms(z), edge_index))
        x = self.conv2(x, adj)
        return F.log_softmax(self.lin(x), dim=1)


class GatedResidual(nn.Module):
    def __init__(self, d: int, hidden: int, out: int) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(d, hidden), nn.Linear(hidden, hidden)
        self.context = nn.Linear(d, hidden, bias=False)
        self.glu = nn.Linear(hidden, 2 * out)
        self.skip = nn.Linear(d, out) if d != out else None
        self.norm = nn.LayerNorm(out)

    def forward(self, x: torch.Tensor, context: torch.Tensor | None = None) -> torch.Tensor:
        residual = x if self.skip is None else self.skip(x)
        h = self.fc1(x)
        if context is not None:
            h = h + self.context(context)
        return self.norm(F.glu(self.glu(self.fc2(F.elu(h))), dim=-1) + residual)


class Forecaster(nn.Module):
    def __init__(self, d: int = 8, quantiles: int = 3) -> None:
        super().__init__()
        self.static = nn.Embedding(5, d)
        self.real = nn.Linear(1, d)
        self.grn = GatedResidual(d, d, d)
        self.lstm = nn.LSTM(d, d, batch_first=True)
        self.attn = nn.MultiheadAttention(d, 2, batch_first=True)
        self.outputs = nn.ModuleList([nn.Linear(d, 1) for _ in range(quantiles)])

    def forward(self, static: torch.Tensor, series: torch.Tensor) -> torch.Tensor:
        x = self.grn(self.real(series), self.static(static).unsqueeze(1))
        x, _ = self.lstm(x)
        x, _ = self.attn(x, x, x)
        return torch.cat([output(x) for output in self.outputs], dim=-1)


class NBeatsBlock(nn.Module):
    def __init__(self, backcast: int = 10, forecast: int = 5, width: int = 16, theta: int = 4) -> None:
        super().__init__()
        self.fc = nn.Sequential(nn.Linear(backcast, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())
        self.theta_b, self.theta_f = nn.Linear(width, theta, bias=False), nn.Linear(width, theta, bias=False)
        self.backcast_fc, self.forecast_fc = nn.Linear(theta, backcast), nn.Linear(theta, forecast)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.fc(x)
        return self.backcast_fc(self.theta_b(x)), self.forecast_fc(self.theta_f(x))


class NBeats(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([NBeatsBlock() for _ in range(2)])

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | int]:
        forecast = 0
        for blk in self.blocks:
            b, f = blk(x)
            x = x - b
            forecast = forecast + f
        return x, forecast


class Relations(nn.Module):
    """Knowledge-graph embeddings, and a bilinear decoder with a matrix per relation."""

    def __init__(self, entities: int = 20, relations: int = 3, d: int = 6) -> None:
        super().__init__()
        self.entity, self.relation = nn.Embedding(entities, d), nn.Embedding(relations, d)
        self.matrices = nn.Parameter(torch.zeros(relations, d, d))
        self.bilinear = nn.Bilinear(d, d, 1)

    def forward(self, head: torch.Tensor, rel: torch.Tensor, tail: torch.Tensor) -> torch.Tensor:
        h, t = self.entity(head), self.entity(tail)
        score = (h * self.relation(rel) * t).sum(-1)
        score = score + torch.einsum("bi,bij,bj->b", h, self.matrices[rel], t)
        return score + self.bilinear(h, t).squeeze(-1)


EXPECTED = {
    "factorization machine": (
        DeepFM,
        {
            **{f"{order}_order.{i}.weight": E for order in ("first", "second") for i in range(2)},
            "dense_linear.weight": O,
            "dnn.0.weight": M,
            "dnn.2.weight": M,
            "dnn_out.weight": O,
        },
    ),
    "dot interaction": (
        DLRM,
        {
            "emb_l.0.weight": E,
            "emb_l.1.weight": E,
            "bot_l.0.weight": M,
            "bot_l.2.weight": M,
            "top_l.0.weight": M,
            "top_l.2.weight": O,
        },
    ),
    "cross network": (
        Cross,
        {
            **{f"U.{i}": MatrixView(batch_dims=1) for i in range(2)},
            **{f"V.{i}": MatrixView(batch_dims=1, transposed=True) for i in range(2)},
            **{f"bias.{i}": X for i in range(2)},
            **{f"gating.{i}.weight": M for i in range(3)},
            "head.weight": O,
        },
    ),
    "two towers": (
        TwoTower,
        {f"{tower}.{i}.weight": role for tower in ("user", "item") for i, role in ((0, E), (1, M), (3, O))},
    ),
    "dueling": (
        Dueling,
        {
            "features.0.weight": M,
            "features.2.weight": M,
            "value.0.weight": M,
            "value.2.weight": O,
            "advantage.0.weight": M,
            "advantage.2.weight": O,
        },
    ),
    "no forward": (
        SoftActorCritic,
        {
            "trunk.0.weight": M,
            "trunk.2.weight": M,
            "mean.weight": O,
            "log_std.weight": O,
            **{f"{q}.{i}.weight": role for q in ("q1", "q2") for i, role in ((0, M), (2, O))},
        },
    ),
    "graph attention": (
        GraphNet,
        {
            "atoms.weight": E,
            "conv1.att_src": X,
            "conv1.att_dst": X,
            "conv1.lin.weight": M,
            "conv2.W": T,
            "conv2.a": X,
            "lin.weight": O,
        },
    ),
    "quantile forecaster": (
        Forecaster,
        {
            "static.weight": E,
            "real.weight": M,
            "grn.fc1.weight": M,
            "grn.fc2.weight": M,
            "grn.context.weight": M,
            "grn.glu.weight": split(8, 8),
            "lstm.weight_ih_l0": split(8, 8, 8, 8),
            "lstm.weight_hh_l0": split(8, 8, 8, 8),
            "attn.in_proj_weight": split(8, 8, 8),
            "attn.out_proj.weight": M,
            **{f"outputs.{i}.weight": O for i in range(3)},
        },
    ),
    "doubly residual": (
        NBeats,
        {
            **{f"blocks.{i}.fc.{j}.weight": M for i in range(2) for j in (0, 2)},
            **{f"blocks.{i}.theta_{k}.weight": M for i in range(2) for k in "bf"},
            "blocks.0.backcast_fc.weight": M,
            "blocks.1.backcast_fc.weight": M,
            **{f"blocks.{i}.forecast_fc.weight": O for i in range(2)},
        },
    ),
    "knowledge graph": (
        Relations,
        {
            "matrices": O,
            "entity.weight": E,
            "relation.weight": E,
            "bilinear.weight": O,
        },
    ),
}
