import math, os, sys
import torch
from torch import nn
import torch.nn.functional as F
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from unseen_common import *

MODELS = []


def add(name, factory, example, rules):
    MODELS.append((name, factory, example, expect(factory, rules)))



# ---------------------------------------------------------------- Mamba
class MambaMixer(nn.Module):
    def __init__(self, d=18, expand=2, n=5, rank=3):
        super().__init__()
        self.di, self.n, self.rank = d * expand, n, rank
        self.in_proj = nn.Linear(d, 2 * self.di, bias=False)
        self.conv1d = nn.Conv1d(self.di, self.di, 4, groups=self.di, padding=3)
        self.x_proj = nn.Linear(self.di, rank + 2 * n, bias=False)
        self.dt_proj = nn.Linear(rank, self.di)
        self.A_log = nn.Parameter(torch.log(torch.arange(1, n + 1).float()).repeat(self.di, 1))
        self.D = nn.Parameter(torch.ones(self.di))
        self.out_proj = nn.Linear(self.di, d, bias=False)

    def forward(self, u):
        b, l, _ = u.shape
        x, z = self.in_proj(u).chunk(2, dim=-1)
        x = F.silu(self.conv1d(x.transpose(1, 2))[..., :l]).transpose(1, 2)
        dt, B, C = self.x_proj(x).split([self.rank, self.n, self.n], dim=-1)
        dt = F.softplus(self.dt_proj(dt))
        A = -torch.exp(self.A_log)
        dA = torch.exp(dt[..., None] * A)
        dBx = dt[..., None] * B[:, :, None] * x[..., None]
        h, ys = x.new_zeros(b, self.di, self.n), []
        for t in range(l):
            h = dA[:, t] * h + dBx[:, t]
            ys.append(torch.einsum("bdn,bn->bd", h, C[:, t]))
        y = torch.stack(ys, 1) + x * self.D
        return self.out_proj(y * F.silu(z))


class Residual(nn.Module):
    def __init__(self, f, d):
        super().__init__()
        self.norm, self.mixer = nn.LayerNorm(d), f

    def forward(self, x):
        return x + self.mixer(self.norm(x))


class MambaLM(nn.Module):
    def __init__(self, v=45, d=18):
        super().__init__()
        self.backbone = nn.ModuleDict({"embeddings": nn.Embedding(v, d), "layers": nn.ModuleList(Residual(MambaMixer(d), d) for _ in range(2)),
                                       "norm_f": nn.LayerNorm(d)})
        self.lm_head = nn.Linear(d, v, bias=False)

    def forward(self, input_ids):
        h = self.backbone["embeddings"](input_ids)
        for l in self.backbone["layers"]:
            h = l(h)
        return self.lm_head(self.backbone["norm_f"](h))


add("mamba", MambaLM, lambda: (torch.randint(0, 45, (2, 6)),), {
    "backbone.embeddings.weight": EMB, "lm_head.weight": OUT, "*.in_proj.weight": mat([36, 36]), "*.conv1d.weight": EL,
    "*.x_proj.weight": mat([3, 5, 5]), "*.dt_proj.weight": M, "*.A_log": EL, "*.out_proj.weight": M})


# ---------------------------------------------------------------- Mamba-2: z, xBC, dt in one projection; conv over xBC, tied
class Mamba2Mixer(nn.Module):
    def __init__(self, d=16, h=3, p=8, n=6):
        super().__init__()
        self.h, self.p, self.n, self.di = h, p, n, h * p
        self.in_proj = nn.Linear(d, 2 * self.di + 2 * n + h, bias=False)
        self.conv_w = nn.Parameter(torch.randn(self.di + 2 * n, 1, 4) * 0.1)
        self.conv_b = nn.Parameter(torch.zeros(self.di + 2 * n))
        self.dt_bias, self.A_log, self.D = nn.Parameter(torch.zeros(h)), nn.Parameter(torch.zeros(h)), nn.Parameter(torch.ones(h))
        self.norm = nn.RMSNorm(self.di)
        self.out_proj = nn.Linear(self.di, d, bias=False)

    def forward(self, u):
        b, l, _ = u.shape
        z, xbc, dt = torch.split(self.in_proj(u), [self.di, self.di + 2 * self.n, self.h], dim=-1)
        xbc = F.silu(F.conv1d(F.pad(xbc.mT, (3, 0)), self.conv_w, self.conv_b, groups=self.conv_w.shape[0]).mT)
        x, B, C = xbc.split([self.di, self.n, self.n], -1)
        x = x.view(b, l, self.h, self.p)
        dt = F.softplus(dt + self.dt_bias)
        a = (-self.A_log.exp() * dt).cumsum(1)
        decay = (a[:, :, None] - a[:, None]).exp() * torch.ones(l, l, device=u.device).tril()[None, :, :, None]
        y = torch.einsum("bln,bsn,blsh,bsh,bshp->blhp", C, B, decay, dt, x) + x * self.D[:, None]
        return self.out_proj(self.norm(y.reshape(b, l, -1) * F.silu(z)))


class Mamba2LM(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(16, 37, bias=False)  # registered first
        self.layers = nn.Sequential(*(Residual(Mamba2Mixer(), 16) for _ in range(2)))
        self.embed = nn.Embedding(37, 16)
        self.embed.weight = self.head.weight

    def forward(self, x):
        return self.head(self.layers(self.embed(x)))


add("mamba2_tied_head_first", Mamba2LM, lambda: (torch.randint(0, 37, (2, 6)),), {
    "head.weight": arg(OUT),  # head and table at once
    "*.in_proj.weight": arg(mat([24, 36, 3])),  # z | xBC | dt; x, B, C are split after a depthwise conv: [24, 24, 6, 6, 3] is defensible
    "*.conv_w": EL, "*.out_proj.weight": M})


# ---------------------------------------------------------------- gated linear attention / delta rule with low-rank gates
class GLA(nn.Module):
    def __init__(self, d=24, h=2, dk=5, dv=9, low=4):
        super().__init__()
        self.h = h
        self.q_proj, self.k_proj = nn.Linear(d, h * dk, bias=False), nn.Linear(d, h * dk, bias=False)
        self.v_proj, self.g_proj = nn.Linear(d, h * dv, bias=False), nn.Linear(d, h * dv, bias=False)
        self.gk_proj = nn.Sequential(nn.Linear(d, low, bias=False), nn.Linear(low, h * dk))
        self.b_proj = nn.Linear(d, h)
        self.g_norm = nn.Parameter(torch.ones(h, dv))
        self.o_proj = nn.Linear(h * dv, d, bias=False)

    def forward(self, x):
        sp = lambda z: z.unflatten(-1, (self.h, -1))
        q, k, v, gk = sp(self.q_proj(x)), F.normalize(sp(self.k_proj(x)), dim=-1), sp(self.v_proj(x)), sp(F.logsigmoid(self.gk_proj(x)))
        beta = self.b_proj(x).sigmoid()
        S, out = None, []
        for t in range(x.size(1)):
            if S is None:
                S = torch.zeros(x.size(0), self.h, k.size(-1), v.size(-1), device=x.device, dtype=x.dtype)
            S = S * gk[:, t].exp()[..., None]
            old = torch.einsum("bhk,bhkv->bhv", k[:, t], S)
            S = S + torch.einsum("bhk,bhv->bhkv", k[:, t], (v[:, t] - old) * beta[:, t, :, None])
            out.append(torch.einsum("bhk,bhkv->bhv", q[:, t], S))
        o = torch.stack(out, 1)
        o = o * torch.rsqrt(o.pow(2).mean(-1, keepdim=True) + 1e-5) * self.g_norm
        return self.o_proj(o.flatten(2) * F.silu(self.g_proj(x)))


class GLAModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(52, 24)
        self.blocks = nn.ModuleList([Residual(GLA(), 24), Residual(nn.Sequential(nn.Linear(24, 61), nn.SiLU(), nn.Linear(61, 24)), 24)])
        self.to_logits = nn.Sequential(nn.LayerNorm(24), nn.Linear(24, 52))

    def forward(self, x):
        x = self.emb(x)
        for b in self.blocks:
            x = b(x)
        return self.to_logits(x)


add("gated_linear_attention", GLAModel, lambda: (torch.randint(0, 52, (2, 5)),), {
    "emb.weight": EMB, "to_logits.0.*": EL, "to_logits.1.weight": OUT, "*.?_proj.weight": M, "*.gk_proj.?.weight": M, "*.g_norm": EL,
    "blocks.1.mixer.?.weight": M})


# ---------------------------------------------------------------- RWKV-4
class TimeMix(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.time_decay, self.time_first = nn.Parameter(torch.linspace(-5, 3, d)), nn.Parameter(torch.zeros(d))
        self.time_mix_k, self.time_mix_v, self.time_mix_r = (nn.Parameter(torch.full((1, 1, d), 0.5)) for _ in range(3))
        self.key, self.value, self.receptance, self.output = (nn.Linear(d, d, bias=False) for _ in range(4))

    def forward(self, x):
        xx = F.pad(x, (0, 0, 1, -1))
        m = lambda c: x * c + xx * (1 - c)
        k, v, r = self.key(m(self.time_mix_k)), self.value(m(self.time_mix_v)), self.receptance(m(self.time_mix_r)).sigmoid()
        a = b = torch.zeros_like(k[:, 0])
        out = []
        for t in range(x.size(1)):
            e = (self.time_first + k[:, t]).clamp(max=20).exp()
            out.append((a + e * v[:, t]) / (b + e + 1e-6))
            w, ek = (-self.time_decay.exp()).exp(), k[:, t].clamp(max=20).exp()
            a, b = w * a + ek * v[:, t], w * b + ek
        return self.output(r * torch.stack(out, 1))


class ChannelMix(nn.Module):
    def __init__(self, d, f):
        super().__init__()
        self.time_mix_k, self.time_mix_r = nn.Parameter(torch.full((1, 1, d), 0.5)), nn.Parameter(torch.full((1, 1, d), 0.5))
        self.key, self.receptance, self.value = nn.Linear(d, f, bias=False), nn.Linear(d, d, bias=False), nn.Linear(f, d, bias=False)

    def forward(self, x):
        xx = F.pad(x, (0, 0, 1, -1))
        k = torch.square(torch.relu(self.key(x * self.time_mix_k + xx * (1 - self.time_mix_k))))
        return torch.sigmoid(self.receptance(x * self.time_mix_r + xx * (1 - self.time_mix_r))) * self.value(k)


class RWKV(nn.Module):
    def __init__(self, v=63, d=14, f=40):
        super().__init__()
        self.emb, self.ln0 = nn.Embedding(v, d), nn.LayerNorm(d)
        self.blocks = nn.ModuleList([nn.ModuleDict(dict(ln1=nn.LayerNorm(d), att=TimeMix(d), ln2=nn.LayerNorm(d), ffn=ChannelMix(d, f))) for _ in range(2)])
        self.ln_out, self.head = nn.LayerNorm(d), nn.Linear(d, v, bias=False)
        self.head_q, self.head_k = nn.Linear(d, 8, bias=False), nn.Linear(d, 8, bias=False)  # copy mechanism over the context: not heads

    def forward(self, idx):
        x = self.ln0(self.emb(idx))
        for b in self.blocks:
            x = x + b["att"](b["ln1"](x))
            x = x + b["ffn"](b["ln2"](x))
        x = self.ln_out(x)
        c = (self.head_q(x) @ self.head_k(x).transpose(-2, -1) / 8).tril()
        return self.head(x) + c @ F.one_hot(idx, self.head.out_features).float()


add("rwkv_copy_head", RWKV, lambda: (torch.randint(0, 63, (2, 6)),), {
    "emb.weight": EMB, "head.weight": OUT, "head_?.weight": arg(M), "*.time_mix_?": EL, "blocks.*.att.time_*": EL,
    "blocks.*.key.weight": M, "blocks.*.value.weight": M, "blocks.*.receptance.weight": M, "blocks.*.output.weight": M})


# ---------------------------------------------------------------- GRU seq2seq with Bahdanau attention (2017 tutorial)
class BahdanauSeq2Seq(nn.Module):
    def __init__(self, src=41, tgt=48, e=11, h=15):
        super().__init__()
        self.enc_emb, self.dec_emb = nn.Embedding(src, e), nn.Embedding(tgt, e)
        self.encoder = nn.GRU(e, h, bidirectional=True, batch_first=True)
        self.bridge = nn.Linear(2 * h, h)
        self.Wa, self.Ua, self.Va = nn.Linear(h, 13), nn.Linear(2 * h, 13), nn.Linear(13, 1)
        self.cell = nn.GRUCell(e + 2 * h, h)
        self.out = nn.Linear(h + 2 * h + e, tgt)

    def forward(self, src, tgt):
        keys, hn = self.encoder(self.enc_emb(src))
        h = torch.tanh(self.bridge(torch.cat([hn[0], hn[1]], -1)))
        logits, inp = [], torch.zeros_like(tgt[:, 0])
        for t in range(tgt.size(1)):
            score = self.Va(torch.tanh(self.Wa(h)[:, None] + self.Ua(keys))).squeeze(-1)
            ctx = torch.bmm(score.softmax(-1)[:, None], keys)[:, 0]
            emb = self.dec_emb(inp)
            h = self.cell(torch.cat([emb, ctx], -1), h)
            logits.append(self.out(torch.cat([h, ctx, emb], -1)))
            inp = tgt[:, t]
        return F.log_softmax(torch.stack(logits, 1), -1)


add("bahdanau_gru", BahdanauSeq2Seq, lambda: (torch.randint(0, 41, (2, 5)), torch.randint(0, 48, (2, 4))), {
    "???_emb.weight": EMB, "encoder.weight_*": mat([15] * 3), "bridge.weight": M, "?a.weight": M,
    "cell.weight_*": mat([15] * 3), "out.weight": OUT})
MODELS[-1][3]["Va.weight"] = arg(M)


# ---------------------------------------------------------------- AWD-LSTM with projection, packed, lengths on the host, char CNN, adaptive softmax
class CharLSTM(nn.Module):
    def __init__(self):
        super().__init__()
        self.char = nn.Embedding(30, 6, padding_idx=0)
        self.convs = nn.ModuleList([nn.Conv1d(6, c, k, padding=k // 2) for c, k in ((8, 1), (10, 3))])
        self.highway = nn.Linear(18, 2 * 18)
        self.lstm = nn.LSTM(18, 21, num_layers=2, proj_size=12, batch_first=True)
        self.crit = nn.AdaptiveLogSoftmaxWithLoss(12, 40, cutoffs=[8, 20], div_value=2.0)

    def forward(self, chars, lengths, target):
        b, t, c = chars.shape
        x = self.char(chars.view(b * t, c)).transpose(1, 2)
        x = torch.cat([F.relu(conv(x)).amax(-1) for conv in self.convs], -1)
        h, g = self.highway(x).chunk(2, -1)
        x = g.sigmoid() * F.relu(h) + (1 - g.sigmoid()) * x
        packed = nn.utils.rnn.pack_padded_sequence(x.view(b, t, -1), lengths.cpu(), batch_first=True, enforce_sorted=False)
        y, _ = nn.utils.rnn.pad_packed_sequence(self.lstm(packed)[0], batch_first=True, total_length=t)
        return self.crit(y.reshape(b * t, -1), target.view(-1)).loss


add("char_lstm_adaptive_packed", CharLSTM, lambda: dict(chars=torch.randint(1, 30, (3, 5, 7)), lengths=torch.tensor([5, 2, 4]), target=torch.randint(0, 40, (3, 5))), {
    "char.weight": EMB, "convs.*.weight": M, "highway.weight": mat([18, 18]), "lstm.weight_hr_*": M, "lstm.weight_?h_*": mat([21] * 4),
    "crit.*weight": OUT})


# ---------------------------------------------------------------- LSTM cell written by hand with bare matrices, unrolled; sentiment
class MyLSTM(nn.Module):
    def __init__(self, i, h):
        super().__init__()
        self.h = h
        self.W, self.U, self.b = nn.Parameter(torch.randn(i, 4 * h) * 0.1), nn.Parameter(torch.randn(h, 4 * h) * 0.1), nn.Parameter(torch.zeros(4 * h))
        self.h0 = nn.Parameter(torch.zeros(1, h))

    def forward(self, x):
        h = self.h0.expand(x.size(0), -1)
        c = torch.zeros_like(h)
        for xt in x.unbind(1):
            i, f, g, o = (xt @ self.W + h @ self.U + self.b).chunk(4, 1)
            c = f.sigmoid() * c + i.sigmoid() * g.tanh()
            h = o.sigmoid() * c.tanh()
        return h


class Sentiment(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.EmbeddingBag(77, 10, mode="mean")
        self.rnn = MyLSTM(10, 16)
        self.fc1 = nn.Linear(16, 16)
        self.fc2 = nn.Linear(16, 1)

    def forward(self, sents):
        b, t, n = sents.shape
        x = self.emb(sents.view(b * t, n)).view(b, t, -1)
        return torch.sigmoid(self.fc2(F.relu(self.fc1(self.rnn(x))))).squeeze(1)


add("handwritten_lstm", Sentiment, lambda: (torch.randint(0, 77, (3, 4, 5)),), {
    "emb.weight": EMB, "rnn.W": mat([16] * 4, transposed=True), "rnn.U": mat([16] * 4, transposed=True), "rnn.h0": EL,
    "fc1.weight": M, "fc2.weight": OUT})
