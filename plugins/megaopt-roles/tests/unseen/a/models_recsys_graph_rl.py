import math, os, sys
import torch
from torch import nn
import torch.nn.functional as F
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from unseen_common import *

MODELS = []


def add(name, factory, example, rules):
    MODELS.append((name, factory, example, expect(factory, rules)))


def mlp(*sizes, act=nn.ReLU):
    layers = []
    for a, b in zip(sizes, sizes[1:]):
        layers += [nn.Linear(a, b), act()]
    return nn.Sequential(*layers[:-1])


# ---------------------------------------------------------------- DLRM with bags and dot interaction
class DLRM(nn.Module):
    def __init__(self, tables=(30, 12, 200), d=8):
        super().__init__()
        self.emb_l = nn.ModuleList([nn.EmbeddingBag(n, d, mode="sum") for n in tables])
        self.bot_l, self.top_l = mlp(5, 17, d), mlp(d + 6, 21, 10, 1)

    def forward(self, dense, offsets, *indices):
        x = self.bot_l(dense)
        ly = [x] + [e(i, offsets) for e, i in zip(self.emb_l, indices)]
        Tn = torch.stack(ly, 1)
        Z = torch.bmm(Tn, Tn.transpose(1, 2))
        li, lj = torch.tril_indices(4, 4, -1)
        return torch.sigmoid(self.top_l(torch.cat([x, Z[:, li, lj]], 1)))


add("dlrm", DLRM, lambda: (torch.randn(3, 5), torch.tensor([0, 2, 5]), torch.randint(0, 30, (7,)), torch.randint(0, 12, (7,)), torch.randint(0, 200, (7,))), {
    "emb_l.*.weight": EMB, "bot_l.?.weight": M, "top_l.0.weight": M, "top_l.2.weight": M, "top_l.4.weight": OUT})


# ---------------------------------------------------------------- DeepFM + DCN (v1 vectors, v2 low rank, one shared big table with offsets)
class DeepCross(nn.Module):
    def __init__(self, fields=(10, 20, 6), d=6):
        super().__init__()
        self.register_buffer("offsets", torch.tensor([0, 10, 30]))
        self.embedding, self.linear = nn.Embedding(sum(fields), d), nn.Embedding(sum(fields), 1)
        self.cross_w = nn.ParameterList([nn.Parameter(torch.randn(18, 1) * 0.1) for _ in range(2)])
        self.cross_b = nn.ParameterList([nn.Parameter(torch.zeros(18, 1)) for _ in range(2)])
        self.U, self.V = nn.Parameter(torch.randn(18, 4) * 0.1), nn.Parameter(torch.randn(18, 4) * 0.1)
        self.deep = mlp(18, 25, 11)
        self.final = nn.Linear(18 + 11, 1, bias=False)
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, x):
        x = x + self.offsets
        e = self.embedding(x)
        fm = 0.5 * (e.sum(1).pow(2) - e.pow(2).sum(1)).sum(1, keepdim=True)
        x0 = e.flatten(1)
        xl = x0
        for w, b in zip(self.cross_w, self.cross_b):
            xl = x0 * (xl @ w) + b.squeeze(1) + xl
        xl = x0 * F.linear(F.linear(xl, self.V.t()), self.U) + xl  # U (V^T x)
        return torch.sigmoid(self.linear(x).sum(1) + fm + self.final(torch.cat([xl, self.deep(x0)], 1)) + self.bias)


add("deepfm_dcn", DeepCross, lambda: (torch.stack([torch.randint(0, n, (4,)) for n in (10, 20, 6)], 1),), {
    "embedding.weight": EMB, "linear.weight": EMB, "cross_w.*": arg(mat(transposed=True)), "cross_b.*": EL, "U": M, "V": mat(transposed=True),
    "deep.?.weight": M, "final.weight": OUT})


# ---------------------------------------------------------------- SASRec / two towers: item table as head, in-batch and sampled negatives
class SASRec(nn.Module):
    def __init__(self, items=70, users=15, d=16):
        super().__init__()
        self.item_emb, self.pos_emb = nn.Embedding(items + 1, d, padding_idx=0), nn.Embedding(10, d)
        self.user_bias, self.item_bias = nn.Embedding(users, 1), nn.Embedding(items + 1, 1)
        self.attn = nn.ModuleList([nn.MultiheadAttention(d, 1) for _ in range(2)])
        self.ffn = nn.ModuleList([nn.ModuleList([nn.Conv1d(d, 22, 1), nn.Conv1d(22, d, 1)]) for _ in range(2)])

    def forward(self, user, seq, pos, neg):
        x = self.item_emb(seq) * 4 + self.pos_emb(torch.arange(seq.size(1), device=seq.device))
        keep = (seq != 0)[..., None]
        mask = torch.ones(seq.size(1), seq.size(1), dtype=torch.bool, device=seq.device).triu(1)
        for a, f in zip(self.attn, self.ffn):
            y = x.transpose(0, 1)
            x = (y + a(y, y, y, attn_mask=mask)[0]).transpose(0, 1) * keep
            x = x + f[1](F.relu(f[0](x.transpose(-1, -2)))).transpose(-1, -2)
        score = lambda i: (x * self.item_emb(i)).sum(-1) + self.item_bias(i)[..., 0] + self.user_bias(user)
        return score(pos), score(neg)


add("sasrec_sampled", SASRec, lambda: (torch.randint(0, 15, (2,)), *(torch.randint(1, 70, (2, 7)) for _ in range(3))), {
    "*_emb.weight": EMB, "*_bias.weight": EMB, "*.in_proj_weight": mat([16] * 3), "*.out_proj.weight": M, "ffn.*.weight": M})


# ---------------------------------------------------------------- GCN + GAT + edge MLP, bare glorot weights, sparse and scatter
class GCNConv(nn.Module):
    def __init__(self, i, o):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(i, o))
        nn.init.xavier_uniform_(self.weight)
        self.bias = nn.Parameter(torch.zeros(o))

    def forward(self, x, adj):
        return torch.spmm(adj, torch.mm(x, self.weight)) + self.bias


class GATConv(nn.Module):
    def __init__(self, i, heads, o):
        super().__init__()
        self.h, self.o = heads, o
        self.lin = nn.Linear(i, heads * o, bias=False)
        self.att_src, self.att_dst = nn.Parameter(torch.randn(1, heads, o)), nn.Parameter(torch.randn(1, heads, o))

    def forward(self, x, ei):
        src, dst = ei
        h = self.lin(x).view(-1, self.h, self.o)
        a = F.leaky_relu((h * self.att_src).sum(-1)[src] + (h * self.att_dst).sum(-1)[dst]).exp()
        den = torch.zeros(len(x), self.h, device=x.device).index_add(0, dst, a)
        out = torch.zeros_like(h).index_add(0, dst, h[src] * (a / (den[dst] + 1e-9))[..., None])
        return out.flatten(1)


class NodeClassifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.atom = nn.Embedding(9, 12)
        self.gc1, self.gat, self.gc2 = GCNConv(12, 15), GATConv(15, 3, 6), GCNConv(18, 5)
        self.edge_mlp = mlp(36 + 2, 14, 1)

    def forward(self, z, edge_index, edge_attr):
        n = z.size(0)
        adj = torch.sparse_coo_tensor(edge_index, torch.ones(edge_index.size(1)), (n, n))
        x = F.relu(self.gc1(self.atom(z), adj))
        x = F.elu(self.gat(x, edge_index))
        link = self.edge_mlp(torch.cat([x[edge_index[0]], x[edge_index[1]], edge_attr], -1))
        return F.log_softmax(self.gc2(x, adj), dim=1), link


add("gcn_gat_link", NodeClassifier, lambda: (torch.randint(0, 9, (10,)), torch.randint(0, 10, (2, 24)), torch.randn(24, 2)), {
    "atom.weight": EMB, "gc1.weight": mat(transposed=True), "gat.lin.weight": M, "gat.att_*": EL, "gc2.weight": OUT,
    "edge_mlp.0.weight": M, "edge_mlp.2.weight": OUT})


# ---------------------------------------------------------------- R-GCN with basis decomposition, GIN eps, host-side graph count, pooled regression
class RGIN(nn.Module):
    def __init__(self, rel=4, bases=2, i=10, d=16):
        super().__init__()
        self.inp = nn.Linear(i, d)
        self.rel_w = nn.Parameter(torch.randn(rel, d, d) * 0.1)
        self.basis, self.comp = nn.Parameter(torch.randn(bases, d, 13) * 0.1), nn.Parameter(torch.randn(rel, bases))
        self.eps = nn.Parameter(torch.zeros(1))
        self.gin = mlp(13, 20, 13)
        self.readout = nn.ModuleList([nn.Linear(16, 2), nn.Linear(13, 2)])

    def forward(self, x, edge_index, etype, batch):
        h = self.inp(x)
        g = int(batch.max().item()) + 1
        pool = lambda t: torch.zeros(g, t.size(1)).index_add(0, batch, t)
        agg = torch.zeros_like(h)
        for r in range(self.rel_w.size(0)):
            m = etype == r
            agg = agg.index_add(0, edge_index[1, m], h[edge_index[0, m]] @ self.rel_w[r])
        h1 = F.relu(agg)
        w = torch.einsum("rb,bio->rio", self.comp, self.basis)
        msg = torch.bmm(h1[edge_index[0]].unsqueeze(1), w[etype]).squeeze(1)
        h2 = torch.zeros(len(x), 13).index_add(0, edge_index[1], msg)
        h2 = self.gin((1 + self.eps) * h2 + h2.mean(0))
        return self.readout[0](pool(h1)) + self.readout[1](pool(h2))


add("rgcn_basis_host", RGIN, lambda: (torch.randn(9, 10), torch.randint(0, 9, (2, 40)), torch.arange(40) % 4, torch.tensor([0] * 5 + [1] * 4)), {
    "inp.weight": M, "rel_w": mat(transposed=True, batched=True), "basis": arg(mat(transposed=True, batched=True)), "comp": arg(EL),
    "gin.?.weight": M, "readout.*.weight": OUT})


# ---------------------------------------------------------------- PPO actor-critic, GRU memory, mixed action space
class PPO(nn.Module):
    def __init__(self, obs=11, act=3, opts=4, h=18):
        super().__init__()
        self.enc = mlp(obs, h, h, act=nn.Tanh)
        self.memory = nn.GRUCell(h, h)
        self.actor_mean, self.log_std = nn.Linear(h, act), nn.Parameter(torch.zeros(1, act))
        self.option = nn.Linear(h, opts)
        self.critic = mlp(h, h, 1, act=nn.Tanh)

    def forward(self, obs, hx):
        hx = self.memory(torch.tanh(self.enc(obs)), hx)
        mean = self.actor_mean(hx)
        dist = torch.distributions.Normal(mean, self.log_std.expand_as(mean).exp(), validate_args=False)
        cat = torch.distributions.Categorical(logits=self.option(hx), validate_args=False)
        a = mean.detach() + 0.1
        return dist.log_prob(a).sum(-1) + cat.logits[:, 0], cat.entropy(), self.critic(hx).squeeze(-1), hx


add("ppo_recurrent", PPO, lambda: (torch.randn(4, 11), torch.zeros(4, 18)), {
    "enc.?.weight": M, "memory.weight_*": mat([18] * 3), "actor_mean.weight": OUT, "log_std": EL, "option.weight": OUT,
    "critic.0.weight": M, "critic.2.weight": OUT})


# ---------------------------------------------------------------- SAC: ensemble critic by bmm, actor fused (mean, log_std)
class EnsembleLinear(nn.Module):
    def __init__(self, e, i, o):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(e, i, o) * 0.1), nn.Parameter(torch.zeros(e, 1, o))

    def forward(self, x):
        return torch.baddbmm(self.bias, x, self.weight)


class SAC(nn.Module):
    def __init__(self, obs=9, act=2, h=20):
        super().__init__()
        self.act, self.act_out = mlp(obs, h, h), nn.Linear(h, 2 * act)
        self.q = nn.Sequential(EnsembleLinear(5, obs + act, 23), nn.ReLU(), EnsembleLinear(5, 23, 1))
        self.log_alpha = nn.Parameter(torch.zeros(()))

    def forward(self, obs):
        mean, log_std = self.act_out(F.relu(self.act(obs))).chunk(2, -1)
        std = log_std.clamp(-5, 2).exp()
        u = mean + std * torch.randn_like(std)
        a = torch.tanh(u)
        logp = (-0.5 * ((u - mean) / std) ** 2 - std.log() - torch.log(1 - a ** 2 + 1e-6)).sum(-1)
        q = self.q(torch.cat([obs, a], -1)[None].expand(5, -1, -1)).squeeze(-1)
        return q, logp * self.log_alpha.exp(), a


add("sac_ensemble", SAC, lambda: (torch.randn(6, 9),), {
    "act.?.weight": M, "act_out.weight": arg(OUT),  # the policy's head, but its action feeds the critic
    "q.0.weight": mat(transposed=True, batched=True), "q.2.weight": OUT, "q.*.bias": EL})


# ---------------------------------------------------------------- Rainbow: noisy layers, dueling distributional
class NoisyLinear(nn.Module):
    def __init__(self, i, o):
        super().__init__()
        self.weight_mu, self.weight_sigma = nn.Parameter(torch.randn(o, i) * 0.1), nn.Parameter(torch.full((o, i), 0.05))
        self.bias_mu, self.bias_sigma = nn.Parameter(torch.zeros(o)), nn.Parameter(torch.full((o,), 0.05))
        self.register_buffer("ei", torch.randn(i)); self.register_buffer("eo", torch.randn(o))

    def forward(self, x):
        return F.linear(x, self.weight_mu + self.weight_sigma * self.eo.outer(self.ei), self.bias_mu + self.bias_sigma * self.eo)


class Rainbow(nn.Module):
    def __init__(self, atoms=7, actions=3):
        super().__init__()
        self.atoms, self.actions = atoms, actions
        self.convs = nn.Sequential(nn.Conv2d(4, 10, 4, 2), nn.ReLU(), nn.Conv2d(10, 14, 3), nn.ReLU(), nn.Flatten())
        self.fc_h_v, self.fc_h_a = NoisyLinear(14 * 9, 16), NoisyLinear(14 * 9, 16)
        self.fc_z_v, self.fc_z_a = NoisyLinear(16, atoms), NoisyLinear(16, actions * atoms)

    def forward(self, x):
        x = self.convs(x / 255)
        v = self.fc_z_v(F.relu(self.fc_h_v(x))).view(-1, 1, self.atoms)
        a = self.fc_z_a(F.relu(self.fc_h_a(x))).view(-1, self.actions, self.atoms)
        return (v + a - a.mean(1, keepdim=True)).log_softmax(-1)


add("rainbow_noisy_dueling", Rainbow, lambda: (torch.rand(2, 4, 12, 12) * 255,), {
    "convs.?.weight": M, "fc_h_?.weight_mu": M, "fc_h_?.weight_sigma": arg(M), "fc_z_?.weight_mu": OUT, "fc_z_?.weight_sigma": arg(OUT)})
