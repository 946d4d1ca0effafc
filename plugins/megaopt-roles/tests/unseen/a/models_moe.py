import math, os, sys
import torch
from torch import nn
import torch.nn.functional as F
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from unseen_common import *

MODELS = []


def add(name, factory, example, rules):
    MODELS.append((name, factory, example, expect(factory, rules)))



class Wrap(nn.Module):
    """Table, residual blocks around a mixture, head."""
    def __init__(self, make, d, v, n=2):
        super().__init__()
        self.embedding = nn.Embedding(v, d)
        self.mixers = nn.ModuleList(nn.Linear(d, d, bias=False) for _ in range(n))
        self.moes = nn.ModuleList(make() for _ in range(n))
        self.norms = nn.ModuleList(nn.LayerNorm(d) for _ in range(n))
        self.unembed = nn.Linear(d, v, bias=False)

    def forward(self, ids):
        x, aux = self.embedding(ids), 0.0
        for mix, moe, norm in zip(self.mixers, self.moes, self.norms):
            y = norm(x)
            w = torch.ones(ids.size(1), ids.size(1), device=x.device).tril()
            x = x + mix((w / w.sum(-1, keepdim=True)) @ y)
            o, a = moe(y)
            x, aux = x + o, aux + a
        return self.unembed(x), aux


WRAP = {"embedding.weight": EMB, "unembed.weight": OUT, "mixers.*.weight": M}


# -------- all experts on all tokens with bmm, expert biases, gate/up in one weight
class DenseBmmExperts(nn.Module):
    def __init__(self, d=20, f=28, e=4, k=2):
        super().__init__()
        self.gate = nn.Linear(d, e, bias=False)
        self.gate_up_proj = nn.Parameter(torch.randn(e, d, 2 * f) * 0.05)
        self.gate_up_proj_bias = nn.Parameter(torch.zeros(e, 2 * f))
        self.down_proj = nn.Parameter(torch.randn(e, f, d) * 0.05)
        self.down_proj_bias = nn.Parameter(torch.zeros(e, d))
        self.k = k

    def forward(self, x):
        shape = x.shape
        x = x.reshape(-1, shape[-1])
        logits = self.gate(x)
        top, idx = logits.topk(self.k, -1)
        w = torch.zeros_like(logits).scatter(1, idx, top.softmax(-1))
        h = torch.bmm(x.expand(w.size(1), -1, -1), self.gate_up_proj) + self.gate_up_proj_bias[:, None]
        g, u = h[..., ::2], h[..., 1::2]  # gpt-oss: interleaved
        y = torch.bmm(g * torch.sigmoid(1.7 * g) * (u + 1), self.down_proj) + self.down_proj_bias[:, None]
        return (y * w.t()[..., None]).sum(0).view(shape), logits.logsumexp(-1).pow(2).mean()


def gpt_oss():
    return Wrap(DenseBmmExperts, 20, 57)


add("moe_gpt_oss_bmm_interleaved", gpt_oss, lambda: (torch.randint(0, 57, (2, 5)),), WRAP | {
    "moes.*.gate.weight": M, "moes.*.gate_up_proj": mat([1, 1], interleaved=True, transposed=True, batched=True),
    "moes.*.down_proj": mat(transposed=True, batched=True), "moes.*_bias": EL})


# -------- Switch / GShard: one-hot dispatch and combine with einsum; w1, w3 in [e, f, d]
class GShard(nn.Module):
    def __init__(self, d=18, f=31, e=3, cap=6):
        super().__init__()
        self.wg = nn.Parameter(torch.randn(d, e) * 0.1)
        self.w1, self.w3 = nn.Parameter(torch.randn(e, f, d) * 0.05), nn.Parameter(torch.randn(e, f, d) * 0.05)
        self.w2 = nn.Parameter(torch.randn(e, d, f) * 0.05)
        self.cap = cap

    def forward(self, x):
        b, t, d = x.shape
        s = x.reshape(-1, d)
        gates = (s @ self.wg).softmax(-1)
        mask = F.one_hot(gates.argmax(-1), gates.size(-1)).to(s.dtype)
        pos = (mask.cumsum(0) - 1) * mask
        disp = mask[..., None] * F.one_hot(pos.long().clamp(max=self.cap), self.cap + 1)[..., :-1].to(s.dtype)
        xe = torch.einsum("sec,sd->ecd", disp, s)
        h = F.silu(torch.einsum("ecd,efd->ecf", xe, self.w1)) * torch.einsum("ecd,efd->ecf", xe, self.w3)
        ye = torch.einsum("ecf,edf->ecd", h, self.w2)
        y = torch.einsum("sec,ecd->sd", disp * gates[..., None], ye).view(b, t, d)
        return y, (gates.mean(0) * mask.mean(0)).sum()


def gshard():
    return Wrap(GShard, 18, 40)


add("moe_gshard_einsum", gshard, lambda: (torch.randint(0, 40, (2, 6)),), WRAP | {
    "moes.*.wg": mat(transposed=True), "moes.*.w?": mat(batched=True)})


# -------- Mixtral loop with index_add_, plus shared expert and its gate; nonzero needs numbers
class Expert(nn.Module):
    def __init__(self, d, f):
        super().__init__()
        self.w1, self.w2, self.w3 = nn.Linear(d, f, bias=False), nn.Linear(f, d, bias=False), nn.Linear(d, f, bias=False)

    def forward(self, x):
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class MixtralLoop(nn.Module):
    def __init__(self, d=24, f=35, e=4):
        super().__init__()
        self.gate = nn.Linear(d, e, bias=False)
        self.experts = nn.ModuleList([Expert(d, f) for _ in range(e)])
        self.shared_expert = Expert(d, 2 * f)
        self.shared_expert_gate = nn.Linear(d, 1, bias=False)

    def forward(self, x):
        b, t, d = x.shape
        x = x.view(-1, d)
        w, sel = self.gate(x).softmax(-1).topk(2, -1)
        out = torch.zeros_like(x)
        mask = F.one_hot(sel, len(self.experts)).permute(2, 1, 0)
        for e, expert in enumerate(self.experts):
            k, rows = torch.where(mask[e])
            if rows.numel() == 0:
                continue
            out.index_add_(0, rows, expert(x[rows]) * w[rows, k, None])
        out = out + torch.sigmoid(self.shared_expert_gate(x)) * self.shared_expert(x)
        return out.view(b, t, d), x.new_zeros(())


def mixtral():
    return Wrap(MixtralLoop, 24, 51)


add("moe_mixtral_loop_shared", mixtral, lambda: (torch.randint(0, 51, (4, 8)),), WRAP | {
    "moes.*.gate.weight": M, "moes.*.w?.weight": M, "moes.*.shared_expert_gate.weight": arg(M)})  # one row


# -------- grouped: sorted tokens, counts to the host, stacked weights sliced by expert; chunked gate_up; aux-free bias
class GroupedExperts(nn.Module):
    def __init__(self, d=22, f=26, e=4, k=2):
        super().__init__()
        self.k, self.e = k, e
        self.router = nn.Linear(d, e, bias=False)
        self.expert_bias = nn.Parameter(torch.zeros(e), requires_grad=False)
        self.w13 = nn.Parameter(torch.randn(e, 2 * f, d) * 0.05)
        self.w2 = nn.Parameter(torch.randn(e, d, f) * 0.05)

    def forward(self, x):
        shape = x.shape
        x = x.reshape(-1, shape[-1])
        scores = self.router(x).sigmoid()
        idx = (scores + self.expert_bias).topk(self.k, -1).indices
        wts = scores.gather(1, idx)
        flat = idx.flatten()
        order = flat.argsort(stable=True)
        counts = torch.bincount(flat, minlength=self.e).tolist()
        parts = x[order // self.k].split(counts)
        ys = []
        for i, p in enumerate(parts):
            g, u = (p @ self.w13[i].t()).chunk(2, dim=-1)
            ys.append(F.linear(F.silu(g) * u, self.w2[i]))
        y = torch.zeros_like(flat, dtype=x.dtype)[:, None].repeat(1, x.size(1)).index_copy(0, order, torch.cat(ys))
        return (y.view(-1, self.k, x.size(1)) * wts[..., None]).sum(1).view(shape), scores.new_zeros(())


def grouped():
    return Wrap(GroupedExperts, 22, 33)


add("moe_grouped_host_counts", grouped, lambda: (torch.randint(0, 33, (3, 7)),), WRAP | {
    "moes.*.router.weight": M, "moes.*.w13": mat([26, 26], batched=True), "moes.*.w2": mat(batched=True)})


# -------- Soft MoE: slots phi, batched experts as baddbmm; classifier over patches
class SoftMoE(nn.Module):
    def __init__(self, d, f, e, p):
        super().__init__()
        self.phi = nn.Parameter(torch.randn(d, e, p) * d ** -0.5)
        self.scale = nn.Parameter(torch.ones(1))
        self.up, self.up_b = nn.Parameter(torch.randn(e, d, f) * 0.1), nn.Parameter(torch.zeros(e, 1, f))
        self.down, self.down_b = nn.Parameter(torch.randn(e, f, d) * 0.1), nn.Parameter(torch.zeros(e, 1, d))

    def forward(self, x):  # b m d
        l = torch.einsum("bmd,dep->bmep", F.normalize(x, dim=-1), self.phi) * self.scale
        dispatch, combine = l.softmax(1), l.flatten(2).softmax(-1).view_as(l)
        s = torch.einsum("bmd,bmep->ebpd", x, dispatch)
        e, b, p, d = s.shape
        h = F.gelu(torch.baddbmm(self.up_b, s.reshape(e, b * p, d), self.up))
        y = torch.baddbmm(self.down_b, h, self.down).view(e, b, p, d)
        return torch.einsum("ebpd,bmep->bmd", y, combine)


class SoftMoEClassifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv1d(4, 16, 4, stride=4)
        self.blocks = nn.Sequential(SoftMoE(16, 25, 3, 2), nn.LayerNorm(16), SoftMoE(16, 25, 3, 2))
        self.fc = nn.Linear(16, 6)

    def forward(self, x):
        return self.fc(self.blocks(self.stem(x).transpose(1, 2)).mean(1))


add("soft_moe", SoftMoEClassifier, lambda: (torch.randn(2, 4, 32),), {
    "stem.weight": M, "fc.weight": OUT, "blocks.*.phi": arg(mat(transposed=True)),
    "blocks.*.up": mat(transposed=True, batched=True), "blocks.*.down": mat(transposed=True, batched=True), "blocks.*_b": EL})


# -------- recommender: multi-gate mixture of experts, experts as one stacked Parameter applied by einsum, towers by task
class MMoE(nn.Module):
    def __init__(self, tasks=("ctr", "cvr", "dwell")):
        super().__init__()
        self.item, self.user = nn.Embedding(100, 7), nn.Embedding(60, 9)
        self.experts = nn.Parameter(torch.randn(3, 20, 13) * 0.1)  # e, in, out
        self.gates = nn.ModuleDict({t: nn.Sequential(nn.Linear(20, 3), nn.Softmax(-1)) for t in tasks})
        self.towers = nn.ModuleDict({t: nn.Sequential(nn.Linear(13, 8), nn.ReLU(), nn.Linear(8, 1)) for t in tasks})

    def forward(self, user, item, dense):
        x = torch.cat([self.user(user), self.item(item), dense], -1)
        ex = F.relu(torch.einsum("bi,eio->beo", x, self.experts))
        return {t: self.towers[t]((self.gates[t](x)[..., None] * ex).sum(1)).sigmoid() for t in self.towers}


add("mmoe_tasks", MMoE, lambda: (torch.randint(0, 60, (5,)), torch.randint(0, 100, (5,)), torch.randn(5, 4)), {
    "item.weight": EMB, "user.weight": EMB, "experts": mat(transposed=True, batched=True), "gates.*.0.weight": M,
    "towers.*.0.weight": M, "towers.*.2.weight": OUT})
