import math, os, sys
import torch
from torch import nn
import torch.nn.functional as F
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from unseen_common import *

MODELS = []


def add(name, factory, example, rules):
    MODELS.append((name, factory, example, expect(factory, rules)))


# ---------------------------------------------------------------- Conformer CTC + inter-CTC with feedback (the vocabulary goes back into the stream)
class ConvModule(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.ln = nn.LayerNorm(d)
        self.pointwise_conv1, self.depthwise_conv = nn.Conv1d(d, 2 * d, 1), nn.Conv1d(d, d, 5, padding=2, groups=d)
        self.bn, self.pointwise_conv2 = nn.BatchNorm1d(d), nn.Conv1d(d, d, 1)

    def forward(self, x):
        y = F.glu(self.pointwise_conv1(self.ln(x).transpose(1, 2)), dim=1)
        return self.pointwise_conv2(F.silu(self.bn(self.depthwise_conv(y)))).transpose(1, 2)


class ConformerLayer(nn.Module):
    def __init__(self, d, f):
        super().__init__()
        ff = lambda: nn.Sequential(nn.LayerNorm(d), nn.Linear(d, f), nn.SiLU(), nn.Linear(f, d))
        self.ff1, self.ff2, self.conv = ff(), ff(), ConvModule(d)
        self.linear_q, self.linear_k, self.linear_v, self.linear_out = (nn.Linear(d, d) for _ in range(4))
        self.linear_pos = nn.Linear(d, d, bias=False)
        self.pos_bias_u, self.pos_bias_v = nn.Parameter(torch.zeros(2, d // 2)), nn.Parameter(torch.zeros(2, d // 2))
        self.norm_a, self.norm = nn.LayerNorm(d), nn.LayerNorm(d)

    def forward(self, x, pos):
        x = x + 0.5 * self.ff1(x)
        y = self.norm_a(x)
        sp = lambda z: z.view(*z.shape[:-1], 2, -1)
        q, k, v, p = sp(self.linear_q(y)), sp(self.linear_k(y)), sp(self.linear_v(y)), sp(self.linear_pos(pos))
        s = torch.einsum("bthd,bshd->bhts", q + self.pos_bias_u, k) + torch.einsum("bthd,shd->bhts", q + self.pos_bias_v, p)
        x = x + self.linear_out(torch.einsum("bhts,bshd->bthd", s.softmax(-1), v).flatten(2))
        x = x + self.conv(x)
        return self.norm(x + 0.5 * self.ff2(x))


class ConformerCTC(nn.Module):
    def __init__(self, mel=20, d=16, vocab=13):
        super().__init__()
        self.subsample = nn.Sequential(nn.Conv2d(1, 7, 3, 2, 1), nn.ReLU(), nn.Conv2d(7, 7, 3, 2, 1), nn.ReLU())
        self.embed = nn.Linear(7 * mel // 4, d)  # not a table
        self.encoders = nn.ModuleList([ConformerLayer(d, 30) for _ in range(2)])
        self.ctc_lo, self.conditioning = nn.Linear(d, vocab), nn.Linear(vocab, d)

    def forward(self, feats, targets, tlen):
        x = self.subsample(feats.unsqueeze(1)).transpose(1, 2).flatten(2)
        x = self.embed(x)
        pos = torch.sin(torch.arange(x.size(1), device=x.device)[:, None] * torch.linspace(1, .1, x.size(2), device=x.device))
        x = self.encoders[0](x, pos)
        inter = self.ctc_lo(x).softmax(-1)
        x = x + self.conditioning(inter)
        logp = self.ctc_lo(self.encoders[1](x, pos)).log_softmax(-1)
        il = torch.full((x.size(0),), x.size(1), dtype=torch.long)
        return F.ctc_loss(logp.transpose(0, 1), targets, il, tlen, zero_infinity=True)


add("conformer_self_conditioned_ctc", ConformerCTC, lambda: (torch.randn(2, 40, 20), torch.randint(1, 13, (2, 4)), torch.tensor([4, 3])), {
    "subsample.?.weight": M, "embed.weight": M, "*.ff?.1.weight": M, "*.ff?.3.weight": M, "*.ff?.0.*": EL,
    "*.conv.pointwise_conv1.weight": mat([16, 16]), "*.conv.depthwise_conv.weight": EL, "*.conv.pointwise_conv2.weight": M, "*.linear_*.weight": M, "*.pos_bias_?": EL,
    "ctc_lo.weight": arg(OUT),  # the last use leaves the model; one use returns
    "conditioning.weight": M})


# ---------------------------------------------------------------- wav2vec-like: grouped positional conv, contrastive loss against a product-quantized target
class Wav2Vec(nn.Module):
    def __init__(self, d=24):
        super().__init__()
        self.fe = nn.ModuleList([nn.Conv1d(1, 10, 10, 5, bias=False), nn.Conv1d(10, 14, 3, 2, bias=False)])
        self.gn = nn.GroupNorm(10, 10)
        self.post = nn.Linear(14, d)
        self.mask_emb = nn.Parameter(torch.rand(d))
        self.pos_conv = nn.utils.parametrizations.weight_norm(nn.Conv1d(d, d, 5, padding=2, groups=3), dim=2)
        self.enc = nn.TransformerEncoder(nn.TransformerEncoderLayer(d, 2, 40, 0.0, batch_first=True), 2, enable_nested_tensor=False)
        self.weight_proj, self.vars = nn.Linear(14, 2 * 6), nn.Parameter(torch.rand(1, 12, 4))
        self.project_q, self.final_proj = nn.Linear(8, 9), nn.Linear(d, 9)

    def forward(self, wav):
        z = F.gelu(self.fe[1](F.gelu(self.gn(self.fe[0](wav[:, None]))))).mT
        x = self.post(z)
        m = torch.zeros(x.shape[:2], dtype=torch.bool, device=x.device)
        m[:, 1::3] = True
        x = torch.where(m[..., None], self.mask_emb, x)
        x = self.enc(x + F.gelu(self.pos_conv(x.mT)).mT)
        p = F.gumbel_softmax(self.weight_proj(z).view(-1, 2, 6), hard=True, dim=-1)
        q = (p.reshape(-1, 12, 1) * self.vars).view(-1, 2, 6, 4).sum(2).view(*z.shape[:2], 8)
        q, y = self.project_q(q), self.final_proj(x)
        sim = F.cosine_similarity(y[:, :, None], q[:, None], dim=-1) / 0.1
        t = torch.arange(y.size(1), device=y.device).expand(y.size(0), -1)
        return F.cross_entropy(sim.flatten(0, 1), t.flatten())


add("wav2vec_contrastive", Wav2Vec, lambda: (torch.randn(2, 100),), {
    "fe.*.weight": M, "post.weight": M, "pos_conv.*.original0": EL,
    "pos_conv.*.original1": arg(M),  # grouped, not depthwise: row pieces of 8 are independent
    "*.in_proj_weight": mat([24] * 3), "*.out_proj.weight": M, "enc.*.linear?.weight": M, "weight_proj.weight": arg(M),
    "vars": arg(EMB),  # multiplied by one-hot codes
    "project_q.weight": arg(OUT), "final_proj.weight": arg(OUT)})


# ---------------------------------------------------------------- hand-written LoRA over a frozen small LM
class LoRALinear(nn.Module):
    def __init__(self, base, r=3, alpha=6):
        super().__init__()
        self.base = base
        self.lora_A, self.lora_B = nn.Parameter(torch.randn(r, base.in_features) * 0.1), nn.Parameter(torch.randn(base.out_features, r) * 0.1)
        self.s = alpha / r

    def forward(self, x):
        return self.base(x) + (x @ self.lora_A.T @ self.lora_B.T) * self.s


class LoRAEmbedding(nn.Module):
    def __init__(self, base, r=2):
        super().__init__()
        self.base = base
        self.lora_embedding_A, self.lora_embedding_B = nn.Parameter(torch.randn(r, base.num_embeddings) * 0.1), nn.Parameter(torch.randn(base.embedding_dim, r) * 0.1)

    def forward(self, i):
        return self.base(i) + F.embedding(i, self.lora_embedding_A.T) @ self.lora_embedding_B.T


class TinyLM(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.lm_head = nn.Embedding(40, 15), nn.Linear(15, 40)
        self.layers = nn.ModuleList(nn.ModuleDict(dict(up=nn.Linear(15, 27), down=nn.Linear(27, 15))) for _ in range(2))
        self.norm = nn.LayerNorm(15)

    def forward(self, i):
        x = self.embed(i).cumsum(1)
        for l in self.layers:
            x = x + l["down"](F.gelu(l["up"](self.norm(x))))
        return self.lm_head(x)


def lora_lm():
    m = TinyLM().requires_grad_(False)
    for l in m.layers:
        l["up"], l["down"] = LoRALinear(l["up"]), LoRALinear(l["down"])
    m.embed, m.lm_head = LoRAEmbedding(m.embed), LoRALinear(m.lm_head)
    m.norm.requires_grad_(True)
    return m


add("lora_everywhere", lora_lm, lambda: (torch.randint(0, 40, (2, 5)),), {
    "layers.*.lora_?": M, "embed.lora_embedding_?": arg(EL), "lm_head.lora_?": arg(EL)})


# ---------------------------------------------------------------- no module owns anything: functional, parameters in a flat dict with mangled names
class Functional(nn.Module):
    def __init__(self, d=12, v=31):
        super().__init__()
        shapes = {"w_e": (v, d), "w_p": (9, d), "a_q": (2, d, 5), "a_k": (2, d, 5), "a_v": (2, d, 5), "a_o": (2, 5, d), "g1": (d,), "m1": (d, 26), "m2": (26, d), "w_u": (d, v), "b_u": (v,)}
        self.p = nn.ParameterDict({k: nn.Parameter(torch.randn(s) * 0.1 if len(s) > 1 else torch.ones(s)) for k, s in shapes.items()})

    def forward(self, tok):
        p = self.p
        x = F.embedding(tok, p["w_e"]) + p["w_p"][None, : tok.size(1)]
        y = F.rms_norm(x, (x.size(-1),), p["g1"])
        q, k, v = (torch.einsum("btd,hdk->bhtk", y, p[n]) for n in ("a_q", "a_k", "a_v"))  # transformer-lens layout
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + torch.einsum("bhtk,hkd->btd", o, p["a_o"])
        x = x + torch.tensordot(F.relu(torch.matmul(x, p["m1"])), p["m2"], dims=([-1], [0]))
        return torch.addmm(p["b_u"], x.flatten(0, 1), p["w_u"])


add("functional_parameter_dict", Functional, lambda: (torch.randint(0, 31, (2, 6)),), {
    "p.w_e": EMB, "p.w_p": EL, "p.a_[qkv]": mat(transposed=True, batched=True),
    "p.a_o": arg(mat(transposed=True, first_dims=2)),  # or one matrix per head
    "p.m?": mat(transposed=True), "p.w_u": OUT})


# ---------------------------------------------------------------- no source to read: exec'd forward, closures, getattr by computed names, dict dispatch
class Dynamic(nn.Module):
    def __init__(self, spec="a9>b14>c14>d8"):
        super().__init__()
        sizes = [(s[0], int(s[1:])) for s in spec.split(">")]
        self._order = []
        for (n, i), (_, o) in zip(sizes, sizes[1:]):
            setattr(self, f"stage_{n}", nn.Linear(i, o))
            self._order.append(f"stage_{n}")
        self.head = nn.Linear(14, 14)  # an attention "head": hidden
        self.fc = nn.Linear(14, 14)
        w = nn.Parameter(torch.randn(14, 7) * 0.2)
        self.register_parameter("captured", w)
        self._fns = {"relu": F.relu, "proj": lambda x: torch.tanh(x @ w), "id": lambda x: x}
        ns = {"torch": torch, "F": F}
        exec("def fwd(self, x, mode):\n"
             "    outs = []\n"
             "    for n in self._order[:-1]:\n"
             "        x = self._fns['relu'](getattr(self, n)(x))\n"
             "    x = x + (self.head(x).softmax(-1)) * self.fc(x)\n"
             "    return {'y': getattr(self, self._order[-1])(x), 'z': self._fns[mode](x)}\n", ns)
        object.__setattr__(self, "_fwd", ns["fwd"])

    def forward(self, x, mode="proj"):
        return self._fwd(self, x, mode)


add("exec_getattr_closure", Dynamic, lambda: dict(x=torch.randn(5, 9), mode="proj"), {
    "stage_a.weight": M, "stage_b.weight": M, "stage_c.weight": OUT, "head.weight": M, "fc.weight": M,
    "captured": OUT})


# ---------------------------------------------------------------- numbers on the host: adaptive computation time, python branches, hooks
class ACT(nn.Module):
    def __init__(self, d=17):
        super().__init__()
        self.digit = nn.Linear(10, d)  # over one-hot codes
        self.step = nn.ModuleDict({"even": nn.Linear(d, d), "odd": nn.Linear(d, d)})
        self.halt = nn.Linear(d, 1)
        self.classifier = nn.Linear(d, 3)
        self.gain = nn.Parameter(torch.ones(d, 1))
        self.classifier.register_forward_pre_hook(lambda m, a: (a[0] * self.gain.squeeze(1),))

    def forward(self, x):
        h = torch.tanh(self.digit(F.one_hot(x, 10).float())).sum(1)
        p, acc, n = 0.0, 0.0, 0
        while n < 4:
            h = torch.tanh(self.step["even" if n % 2 == 0 else "odd"](h))
            ph = self.halt(h).sigmoid()
            acc, p, n = acc + ph * h, p + ph.mean().item(), n + 1
            if p > 0.99 and n > 1:
                break
        return self.classifier(acc), torch.tensor(float(n))


add("act_item_halting", ACT, lambda: (torch.randint(0, 10, (4, 3)),), {
    "digit.weight": arg(EMB),  # "multiplied by one-hot codes" says table, its type says layer
    "step.*.weight": M, "halt.weight": arg(M), "classifier.weight": OUT, "gain": EL})


# ---------------------------------------------------------------- custom autograd.Function and class named ...Linear; autocast; numpy output statistics
class _QuantMM(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        s = w.abs().mean()
        return x.reshape(-1, x.size(-1)).mm((torch.sign(w) * s).t()).view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        g = g.to(w.dtype)
        return (g @ w).to(x.dtype), g.reshape(-1, g.size(-1)).t() @ x.reshape(-1, x.size(-1)).to(w.dtype)


class BitLinear(nn.Module):
    def __init__(self, i, o):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(o, i) * 0.1)

    def forward(self, x):
        return _QuantMM.apply(F.layer_norm(x, (x.size(-1),)), self.weight)


class BitNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.tok = nn.Embedding(38, 16)
        self.blocks = nn.ModuleList([nn.ModuleDict(dict(qkv=BitLinear(16, 48), o=BitLinear(16, 16), w13=BitLinear(16, 42), w2=BitLinear(21, 16))) for _ in range(2)])
        self.out = nn.Linear(16, 38)

    def forward(self, t):
        x = self.tok(t)
        with torch.autocast("cpu", torch.bfloat16):
            for b in self.blocks:
                q, k, v = b["qkv"](x).float().tensor_split(3, -1)
                x = x + b["o"](F.scaled_dot_product_attention(q, k, v))
                h = b["w13"](x)
                x = x + b["w2"](F.silu(h[..., :21]) * h[..., 21:])
        return self.out(x.float())


add("bitnet_custom_function", BitNet, lambda: (torch.randint(0, 38, (2, 5)),), {
    "tok.weight": EMB, "*.qkv.weight": mat([16] * 3), "*.o.weight": M, "*.w13.weight": mat([21, 21]), "*.w2.weight": M, "out.weight": OUT})
