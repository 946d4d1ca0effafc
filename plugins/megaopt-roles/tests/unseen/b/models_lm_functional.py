"""Code in the style of JAX: parameter trees, einsum, stacked layers; autograd functions and custom ops."""

import math

import torch
import torch.nn.functional as F
from torch import nn

EMB, OUT, MAT, ELE = "embedding", "output", "matrix", "elementwise"
V, D, H, K, HID = 61, 24, 3, 8, 40


def normal(*shape, std=0.05):
    return nn.Parameter(torch.randn(*shape) * std)


# --- 5: a flat tree of arrays, [in, out] as in JAX


def layer_norm(x, g, b, eps=1e-5):
    mu = x.mean(-1, keepdims=True)
    var = ((x - mu) ** 2).mean(-1, keepdims=True)
    return g * (x - mu) / torch.sqrt(var + eps) + b


def causal_attention(q, k, v):
    s = q.shape[-2]
    mask = torch.tril(torch.ones(s, s, device=q.device))
    w = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    return torch.softmax(w * mask - 1e9 * (1 - mask), -1) @ v


def gpt_apply(p, n_layer, ids):
    x = p["wte"][ids] + p["wpe"][: ids.shape[1]]
    for i in range(n_layer):
        h = layer_norm(x, p[f"h{i}_ln1_g"], p[f"h{i}_ln1_b"])
        q, k, v = torch.split(h @ p[f"h{i}_attn_qkv_w"] + p[f"h{i}_attn_qkv_b"], D, dim=-1)
        q, k, v = (t.unflatten(-1, (H, K)).transpose(1, 2) for t in (q, k, v))
        a = causal_attention(q, k, v).transpose(1, 2).flatten(2)
        x = x + a @ p[f"h{i}_attn_proj_w"]
        h = layer_norm(x, p[f"h{i}_ln2_g"], p[f"h{i}_ln2_b"])
        x = x + F.gelu(h @ p[f"h{i}_mlp_in_w"] + p[f"h{i}_mlp_in_b"]) @ p[f"h{i}_mlp_out_w"]
    x = layer_norm(x, p["lnf_g"], p["lnf_b"])
    return x @ p["wte"].T


class JaxGPT(nn.Module):
    def __init__(self, n_layer=2):
        super().__init__()
        tree = {"wte": normal(V, D), "wpe": normal(16, D)}
        for i in range(n_layer):
            tree |= {
                f"h{i}_ln1_g": nn.Parameter(torch.ones(D)),
                f"h{i}_ln1_b": nn.Parameter(torch.zeros(D)),
                f"h{i}_ln2_g": nn.Parameter(torch.ones(D)),
                f"h{i}_ln2_b": nn.Parameter(torch.zeros(D)),
                f"h{i}_attn_qkv_w": normal(D, 3 * D),
                f"h{i}_attn_qkv_b": nn.Parameter(torch.zeros(3 * D)),
                f"h{i}_attn_proj_w": normal(D, D),
                f"h{i}_mlp_in_w": normal(D, 4 * D),
                f"h{i}_mlp_in_b": nn.Parameter(torch.zeros(4 * D)),
                f"h{i}_mlp_out_w": normal(4 * D, D),
            }
        tree |= {"lnf_g": nn.Parameter(torch.ones(D)), "lnf_b": nn.Parameter(torch.zeros(D))}
        self.params = nn.ParameterDict(tree)
        self.n_layer = n_layer

    def forward(self, ids):
        return gpt_apply(self.params, self.n_layer, ids)


jax_expected = {
    "params.wte": (EMB, None, "arguable"),  # tied: embedding, or output
    "params.wpe": (ELE, None),
    "params.lnf_g": (ELE, None),
    "params.lnf_b": (ELE, None),
}
for i in range(2):
    p = f"params.h{i}_"
    for n in ("ln1_g", "ln1_b", "ln2_g", "ln2_b", "attn_qkv_b", "mlp_in_b"):
        jax_expected[p + n] = (ELE, None)
    jax_expected |= {
        p + "attn_qkv_w": (MAT, dict(dim=0, sizes=[D, D, D], interleaved=False, transposed=True)),
        p + "attn_proj_w": (MAT, dict(transposed=True)),
        p + "mlp_in_w": (MAT, dict(transposed=True)),
        p + "mlp_out_w": (MAT, dict(transposed=True)),
    }


# --- 6: heads as dimensions of the weights, Gemma-like kv and gating stacks


class EinsumBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.pre_attn, self.pre_ffw = nn.Parameter(torch.zeros(D)), nn.Parameter(torch.zeros(D))
        self.q_einsum = normal(D, H, K)
        self.kv_einsum = normal(2, D, H, K)
        self.attn_vec_einsum = normal(H, K, D)
        self.gating_einsum = normal(D, 2, HID)
        self.linear = normal(HID, D)

    def rms(self, x, scale):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * (1 + scale)

    def forward(self, x):
        h = self.rms(x, self.pre_attn)
        q = torch.einsum("BTD,DNH->BTNH", h, self.q_einsum)
        k, v = torch.einsum("BSD,CDNH->CBSNH", h, self.kv_einsum)
        logits = torch.einsum("BTNH,BSNH->BNTS", q * K**-0.5, k)
        probs = logits.softmax(-1)
        enc = torch.einsum("BNTS,BSNH->BTNH", probs, v)
        x = x + torch.einsum("BTNH,NHD->BTD", enc, self.attn_vec_einsum)
        h = self.rms(x, self.pre_ffw)
        gates = torch.einsum("BTD,DCF->CBTF", h, self.gating_einsum)
        return x + torch.einsum("BTF,FD->BTD", F.gelu(gates[0]) * gates[1], self.linear)


class EinsumEncoder(nn.Module):
    """A sentence classifier over one-hot codes: the table is multiplied, never indexed."""

    def __init__(self, classes=5):
        super().__init__()
        self.input_embedding = normal(V, D)
        self.blocks = nn.ModuleList([EinsumBlock(), EinsumBlock()])
        self.readout = normal(D, classes)
        self.readout_bias = nn.Parameter(torch.zeros(classes))

    def forward(self, ids):
        x = F.one_hot(ids, V).to(self.input_embedding.dtype) @ self.input_embedding
        for block in self.blocks:
            x = block(x)
        return torch.einsum("bd,dc->bc", x.mean(1), self.readout) + self.readout_bias


einsum_expected = {"input_embedding": (EMB, None), "readout": (OUT, None), "readout_bias": (ELE, None)}
for i in range(2):
    p = f"blocks.{i}."
    einsum_expected |= {
        p + "pre_attn": (ELE, None),
        p + "pre_ffw": (ELE, None),
        p + "q_einsum": (MAT, dict(transposed=True)),
        p + "kv_einsum": (MAT, dict(batched=True, transposed=True)),
        p + "attn_vec_einsum": (MAT, dict(transposed=True, first_dims=2)),
        p + "gating_einsum": (MAT, dict(dim=0, sizes=[HID, HID], interleaved=False, transposed=True)),
        p + "linear": (MAT, dict(transposed=True)),
    }


# --- 7: layers stacked for a scan, every leaf has a leading layer dimension


class ScannedLM(nn.Module):
    def __init__(self, layers=3):
        super().__init__()
        self.embed = normal(V, D)
        self.stack = nn.ParameterDict(
            {
                "norm_attn": nn.Parameter(torch.ones(layers, D)),
                "norm_mlp": nn.Parameter(torch.ones(layers, D)),
                "wqkv": normal(layers, 3, D, H, K),
                "wo": normal(layers, H, K, D),
                "w_up": normal(layers, D, HID),
                "b_up": nn.Parameter(torch.zeros(layers, HID)),
                "w_down": normal(layers, HID, D),
            }
        )
        self.final = nn.Parameter(torch.ones(D))
        self.lm = normal(D, V)

    def forward(self, tokens):
        x = self.embed[tokens]
        names = list(self.stack.keys())
        for leaves in zip(*(self.stack[n].unbind(0) for n in names)):
            x = self.body(x, dict(zip(names, leaves)))
        return F.rms_norm(x, (D,), self.final) @ self.lm

    def body(self, x, w):
        h = F.rms_norm(x, (D,), w["norm_attn"])
        q, k, v = torch.einsum("bsd,cdhk->cbhsk", h, w["wqkv"])
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + torch.einsum("bhsk,hkd->bsd", a, w["wo"])
        h = F.rms_norm(x, (D,), w["norm_mlp"])
        return x + F.relu(h @ w["w_up"] + w["b_up"]).square() @ w["w_down"]


scan_expected = {
    "embed": (EMB, None),
    "stack.norm_attn": (ELE, None),
    "stack.norm_mlp": (ELE, None),
    "stack.wqkv": (MAT, dict(batched=True, batch_dims=2, transposed=True)),
    "stack.wo": (MAT, dict(batched=True, transposed=True, first_dims=2)),
    "stack.w_up": (MAT, dict(batched=True, transposed=True)),
    "stack.b_up": (ELE, None),
    "stack.w_down": (MAT, dict(batched=True, transposed=True)),
    "final": (ELE, None),
    "lm": (OUT, None),
}


# --- 8: products inside an autograd.Function and inside a custom op


class LinearFn(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, b):
        ctx.save_for_backward(x, w)
        return x @ w.t() + b

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        return g @ w, g.flatten(0, -2).t() @ x.flatten(0, -2), g.flatten(0, -2).sum(0)


@torch.library.custom_op("unseen::swiglu", mutates_args=())
def swiglu_op(x: torch.Tensor, w_in: torch.Tensor, w_out: torch.Tensor) -> torch.Tensor:
    gate, up = (x @ w_in.t()).chunk(2, -1)
    return (F.silu(gate) * up) @ w_out.t()


@swiglu_op.register_fake
def _(x, w_in, w_out):
    return x.new_empty(*x.shape[:-1], w_out.shape[0])


def _swiglu_setup(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


def _swiglu_backward(ctx, grad):
    with torch.enable_grad():
        leaves = [t.detach().requires_grad_() for t in ctx.saved_tensors]
        x, w_in, w_out = leaves
        gate, up = (x @ w_in.t()).chunk(2, -1)
        y = (F.silu(gate) * up) @ w_out.t()
    return torch.autograd.grad(y, leaves, grad)


swiglu_op.register_autograd(_swiglu_backward, setup_context=_swiglu_setup)


class FastLinear(nn.Module):
    def __init__(self, fan_in, fan_out):
        super().__init__()
        self.kernel = normal(fan_out, fan_in)
        self.shift = nn.Parameter(torch.zeros(fan_out))

    def forward(self, x):
        return LinearFn.apply(x, self.kernel, self.shift)


class KernelBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(D), nn.LayerNorm(D)
        self.q, self.k, self.v, self.o = (FastLinear(D, D) for _ in range(4))
        self.w_in, self.w_out = normal(2 * HID, D), normal(D, HID)

    def forward(self, x):
        h = self.norm1(x)
        q, k, v = (m(h).unflatten(-1, (H, K)).transpose(1, 2) for m in (self.q, self.k, self.v))
        x = x + self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + torch.ops.unseen.swiglu(self.norm2(x), self.w_in, self.w_out)


class KernelNet(nn.Module):
    """Regresses three numbers per token from measured features."""

    def __init__(self):
        super().__init__()
        self.inp = FastLinear(7, D)
        self.body = nn.ModuleList(KernelBlock() for _ in range(2))
        self.out = FastLinear(D, 3)

    def forward(self, feats):
        x = self.inp(feats)
        for block in self.body:
            x = block(x)
        return self.out(x)


kernel_expected = {
    "inp.kernel": (MAT, None),
    "inp.shift": (ELE, None),
    "out.kernel": (OUT, None),
    "out.shift": (ELE, None),
}
for i in range(2):
    p = f"body.{i}."
    for n in "qkvo":
        kernel_expected |= {p + n + ".kernel": (MAT, None), p + n + ".shift": (ELE, None)}
    for n in ("norm1", "norm2"):
        kernel_expected |= {p + n + ".weight": (ELE, None), p + n + ".bias": (ELE, None)}
    kernel_expected |= {
        # inside the op: the split can be known only by reading it
        p + "w_in": (MAT, dict(dim=0, sizes=[HID, HID], interleaved=False), "arguable"),
        p + "w_out": (MAT, None),
    }


def ids():
    return torch.randint(0, V, (2, 9))


MODELS = [
    ("jax_tree_gpt", JaxGPT, lambda: (ids(),), jax_expected),
    ("einsum_heads_onehot", EinsumEncoder, lambda: (ids(),), einsum_expected),
    ("scan_stacked_lm", ScannedLM, lambda: {"tokens": ids()}, scan_expected),
    ("custom_kernels", KernelNet, lambda: (torch.randn(2, 9, 7),), kernel_expected),
]
