"""The structure of real language models, written again in plain torch: same names, shapes and ties.

They stand in for transformers, timm and peft where those are not installed. No replica says which of its layers is the
head, and none is needed to run: what counts is that its source does with every parameter what the real one does.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import nn

__all__ = ["DECODERS", "MLP", "Attention", "GatedMLP", "RMSNorm"]


class RMSNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


class Conv1D(nn.Module):
    def __init__(self, nf: int, nx: int) -> None:
        super().__init__()
        self.nf = nf
        self.weight = nn.Parameter(torch.empty(nx, nf))
        self.bias = nn.Parameter(torch.zeros(nf))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight).view(*x.size()[:-1], self.nf)


class Attention(nn.Module):
    """Separate q, k and v, under whatever names."""

    def __init__(
        self,
        names: str = "q_proj k_proj v_proj o_proj",
        *,
        width: int = 32,
        keys: int = 32,
        bias: bool = False,
        heads: int = 4,
    ) -> None:
        super().__init__()
        self.names, self.heads = names.split(), heads
        sizes = (width, keys, keys, width)
        for name, size in zip(self.names, sizes, strict=True):
            setattr(self, name, nn.Linear(width, size, bias=bias))

    def forward(
        self, x: torch.Tensor, memory: torch.Tensor | None = None, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        memory = x if memory is None else memory
        q, k, v, out = (getattr(self, name) for name in self.names)
        shape = (*x.shape[:-1], self.heads, -1)
        q, k, v = q(x).view(shape), k(memory), v(memory)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        return out(y.flatten(2))


class MLP(nn.Module):
    """Two layers, under whatever names."""

    def __init__(self, names: str = "fc1 fc2", inner: int = 48, *, bias: bool = True) -> None:
        super().__init__()
        self.names = names.split()
        setattr(self, self.names[0], nn.Linear(32, inner, bias=bias))
        setattr(self, self.names[1], nn.Linear(inner, 32, bias=bias))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return getattr(self, self.names[1])(F.gelu(getattr(self, self.names[0])(x)))


class GatedMLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(32, 48, bias=False), nn.Linear(32, 48, bias=False)
        self.down_proj = nn.Linear(48, 32, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    """A pre-norm block: attention, then a layer of its own kind, under whatever names."""

    def __init__(
        self, names: str, norm: Callable[[int], nn.Module], attention: nn.Module, mlp: nn.Module
    ) -> None:
        super().__init__()
        self.names = names.split()
        for name, module in zip(self.names, (norm(32), attention, norm(32), mlp), strict=True):
            self.add_module(name, module)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, attention, second, mlp = (getattr(self, name) for name in self.names)
        x = x + attention(first(x))
        return x + mlp(second(x))


class Body(nn.Module):
    """Embedding, blocks, norm, under whatever names."""

    def __init__(
        self,
        names: str,
        block: Callable[[], nn.Module],
        norm: Callable[[int], nn.Module],
        *,
        positions: int = 0,
    ) -> None:
        super().__init__()
        self.names = names.split()
        setattr(self, self.names[0], nn.Embedding(96, 32))
        if positions:
            self.wpe = nn.Embedding(positions, 32)
        setattr(self, self.names[1], nn.ModuleList(block() for _ in range(2)))
        setattr(self, self.names[2], norm(32))
        self.positions = positions

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = getattr(self, self.names[0])(ids)
        if self.positions:
            x = x + self.wpe(torch.arange(ids.shape[1], device=ids.device))
        for block in getattr(self, self.names[1]):
            x = block(x)
        return getattr(self, self.names[2])(x)


class Decoder(nn.Module):
    """A language model: a body under its name, and a head that may be tied."""

    def __init__(self, name: str, body: nn.Module, *, tied: bool = False) -> None:
        super().__init__()
        self.name = name
        setattr(self, name, body)
        self.lm_head = nn.Linear(32, 96, bias=False)
        if tied:
            self.lm_head.weight = next(body.children()).weight

    def forward(
        self, ids: torch.Tensor, labels: torch.Tensor | None = None
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        logits = self.lm_head(getattr(self, self.name)(ids))
        return (
            (logits, F.cross_entropy(logits.flatten(0, 1), labels.flatten()))
            if labels is not None
            else logits
        )


class FusedConv1D(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.c_attn, self.c_proj = Conv1D(96, 32), Conv1D(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.c_attn(x).split(32, dim=2)
        return self.c_proj(F.scaled_dot_product_attention(q, k, v))


class Conv1DMLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.c_fc, self.c_proj = Conv1D(128, 32), Conv1D(32, 128)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.c_proj(F.gelu(self.c_fc(x)))


def gpt2() -> nn.Module:
    def block():
        return Block("ln_1 attn ln_2 mlp", nn.LayerNorm, FusedConv1D(), Conv1DMLP())

    return Decoder("transformer", Body("wte h ln_f", block, nn.LayerNorm, positions=16), tied=True)


_LLAMA = "input_layernorm self_attn post_attention_layernorm mlp"


def llama(*, tied: bool = False) -> nn.Module:
    def block():
        return Block(_LLAMA, RMSNorm, Attention(keys=16), GatedMLP())

    return Decoder("model", Body("embed_tokens layers norm", block, RMSNorm), tied=tied)


class NormedAttention(Attention):
    """q and k pass a norm per head."""

    def __init__(self) -> None:
        super().__init__(keys=16)
        self.q_norm, self.k_norm = RMSNorm(8), RMSNorm(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = self.q_norm(self.q_proj(x).view(*x.shape[:-1], -1, 8)).transpose(1, 2)
        k = self.k_norm(self.k_proj(x).view(*x.shape[:-1], -1, 8)).transpose(1, 2)
        v = self.v_proj(x).view(*x.shape[:-1], -1, 8).transpose(1, 2)
        return self.o_proj(
            F.scaled_dot_product_attention(q, k, v, enable_gqa=True).transpose(1, 2).flatten(2)
        )


class Router(nn.Module):
    def __init__(self, *, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4, 32))
        self.bias = nn.Parameter(torch.zeros(4)) if bias else None

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return F.linear(x, self.weight, self.bias).softmax(-1).topk(2, dim=-1)


class Experts(nn.Module):
    """Stacks `[experts, out, in]`, gate and up block by block."""

    def __init__(self, inner: int) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.empty(4, 2 * inner, 32))
        self.down_proj = nn.Parameter(torch.empty(4, 32, inner))

    def forward(self, x: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(x)
        for expert in index.unique():
            rows, place = torch.where(index == expert)
            gate, up = F.linear(x[rows], self.gate_up_proj[expert]).chunk(2, dim=-1)
            y = F.linear(F.silu(gate) * up, self.down_proj[expert])
            out.index_add_(0, rows, y * weights[rows, place, None])
        return out


class InterleavedExperts(nn.Module):
    """Stacks `[experts, in, out]` with biases, gate and up row by row."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.empty(4, 32, 96))
        self.gate_up_proj_bias = nn.Parameter(torch.empty(4, 96))
        self.down_proj = nn.Parameter(torch.empty(4, 48, 32))
        self.down_proj_bias = nn.Parameter(torch.empty(4, 32))

    def gated(self, y: torch.Tensor) -> torch.Tensor:
        gate, up = y[..., ::2], y[..., 1::2]
        return (up + 1) * gate * torch.sigmoid(gate)

    def forward(self, x: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(x)
        for expert in index.unique():
            rows, place = torch.where(index == expert)
            y = self.gated(x[rows] @ self.gate_up_proj[expert] + self.gate_up_proj_bias[expert])
            y = y @ self.down_proj[expert] + self.down_proj_bias[expert]
            out.index_add_(0, rows, y * weights[rows, place, None])
        return out


class Mixture(nn.Module):
    def __init__(self, router: nn.Module, experts: nn.Module, *, gate: str = "gate") -> None:
        super().__init__()
        self.gate_name = gate
        self.add_module(gate, router)
        self.experts = experts

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.reshape(-1, x.shape[-1])
        weights, index = getattr(self, self.gate_name)(flat)
        return self.experts(flat, index, weights).view(x.shape)


def qwen3_moe() -> nn.Module:
    def block():
        return Block(_LLAMA, RMSNorm, NormedAttention(), Mixture(Router(), Experts(24)))

    return Decoder("model", Body("embed_tokens layers norm", block, RMSNorm))


def mixtral() -> nn.Module:
    def block():
        return Block(_LLAMA, RMSNorm, Attention(keys=16), Mixture(Router(), Experts(48)))

    return Decoder("model", Body("embed_tokens layers norm", block, RMSNorm))


class SinkAttention(Attention):
    """A learned score per head that takes what no key gets."""

    def __init__(self) -> None:
        super().__init__(keys=16, bias=True)
        self.sinks = nn.Parameter(torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        scores = torch.cat([q @ k.transpose(-1, -2), self.sinks.reshape(1, -1, 1)], dim=-1)
        return self.o_proj(scores.softmax(-1)[..., :-1] @ v)


def gpt_oss() -> nn.Module:
    def block():
        mixture = Mixture(Router(bias=True), InterleavedExperts(), gate="router")
        return Block(_LLAMA, RMSNorm, SinkAttention(), mixture)

    return Decoder("model", Body("embed_tokens layers norm", block, RMSNorm))


class FusedPerHead(nn.Module):
    """q, k and v side by side within each head."""

    def __init__(self) -> None:
        super().__init__()
        self.query_key_value, self.dense = nn.Linear(32, 96), nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        qkv = self.query_key_value(x).view(*x.shape[:-1], -1, 24).transpose(1, 2)
        q, k, v = qkv.chunk(3, dim=-1)
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2)
        return self.dense(y.reshape(*x.shape[:-1], -1))


class ParallelBlock(nn.Module):
    """Attention and layer side by side."""

    def __init__(self) -> None:
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = nn.LayerNorm(32), nn.LayerNorm(32)
        self.attention, self.mlp = FusedPerHead(), MLP("dense_h_to_4h dense_4h_to_h")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.attention(self.input_layernorm(x)) + self.mlp(self.post_attention_layernorm(x))


def gpt_neox() -> nn.Module:
    return Decoder("gpt_neox", Body("embed_in layers final_layer_norm", ParallelBlock, nn.LayerNorm))


class FusedSlices(nn.Module):
    """q, k and v cut out by position."""

    def __init__(self) -> None:
        super().__init__()
        self.heads, self.groups, self.size = 4, 2, 8
        self.o_proj, self.qkv_proj = nn.Linear(32, 32, bias=False), nn.Linear(32, 64, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        qkv = self.qkv_proj(x)
        end, keys = self.heads * self.size, self.groups * self.size
        q, k, v = qkv[..., :end], qkv[..., end : end + keys], qkv[..., end + keys :]
        return self.o_proj(F.scaled_dot_product_attention(q, k, v, enable_gqa=True))


class FusedGate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj, self.down_proj = nn.Linear(32, 96, bias=False), nn.Linear(48, 32, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(up * F.silu(gate))


def phi3() -> nn.Module:
    def block():
        return Block(
            "input_layernorm self_attn post_attention_layernorm mlp", RMSNorm, FusedSlices(), FusedGate()
        )

    return Decoder("model", Body("embed_tokens layers norm", block, RMSNorm))


class Mixer(nn.Module):
    """Mamba's mixer, one step after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.A_log, self.D = nn.Parameter(torch.zeros(64, 4)), nn.Parameter(torch.ones(64))
        self.conv1d = nn.Conv1d(64, 64, 4, groups=64, padding=3)
        self.in_proj, self.x_proj = nn.Linear(32, 128, bias=False), nn.Linear(64, 11, bias=False)
        self.dt_proj, self.out_proj = nn.Linear(3, 64), nn.Linear(64, 32, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden, gate = self.in_proj(x).transpose(1, 2).chunk(2, dim=1)
        hidden = F.silu(self.conv1d(hidden)[..., : x.shape[1]])
        step, b, c = torch.split(self.x_proj(hidden.transpose(1, 2)), [3, 4, 4], dim=-1)
        step = F.softplus(self.dt_proj(step)).transpose(1, 2)
        decay = torch.exp(-torch.exp(self.A_log.float())[None, :, None, :] * step[:, :, :, None])
        state, outs = torch.zeros_like(decay[:, :, 0]), []
        for t in range(x.shape[1]):
            state = decay[:, :, t] * state + (step * hidden)[:, :, t, None] * b[:, None, t]
            outs.append(torch.matmul(state, c[:, t].unsqueeze(-1))[:, :, 0])
        y = torch.stack(outs, dim=-1) + hidden * self.D[None, :, None]
        return self.out_proj((y * F.silu(gate)).transpose(1, 2))


class MixerBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mixer = RMSNorm(32), Mixer()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mixer(self.norm(x))


def mamba() -> nn.Module:
    return Decoder("backbone", Body("embeddings layers norm_f", MixerBlock, RMSNorm), tied=True)


DECODERS = {
    "gpt2": gpt2,
    "llama": llama,
    "llama_tied": lambda: llama(tied=True),
    "qwen3_moe": qwen3_moe,
    "mixtral": mixtral,
    "gpt_oss": gpt_oss,
    "gpt_neox": gpt_neox,
    "phi3": phi3,
    "mamba": mamba,
}
