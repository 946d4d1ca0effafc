"""Small models in the styles that people write, each with what its parameters are."""

import math
from typing import Any, Never

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import nn

from megaopt_core.params import MatrixView, Role

E, O, X = Role.EMBEDDING, Role.OUTPUT, Role.ELEMENTWISE  # noqa: E741 - a table of one-letter roles reads best
M, T = MatrixView(), MatrixView(transposed=True)


def split(*sizes: int, **view: Any) -> MatrixView:
    """Return a split view."""
    return MatrixView(split_sizes=sizes, **view)


class Block(nn.Module):
    """A block of a GPT written by hand, with fused q, k and v."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.width = heads, width
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.c_attn = nn.Linear(width, 3 * width)
        self.c_proj = nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, c = x.size()
        q, k, v = self.c_attn(self.ln_1(x)).split(self.width, dim=2)
        k = k.view(b, t, self.heads, c // self.heads).transpose(1, 2)
        q = q.view(b, t, self.heads, c // self.heads).transpose(1, 2)
        v = v.view(b, t, self.heads, c // self.heads).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        y = y.transpose(1, 2).contiguous().view(b, t, c)
        x = x + self.c_proj(y)
        return x + self.mlp(self.ln_2(x))


class HandGPT(nn.Module):
    """nanoGPT's shape: modules in a ModuleDict, the head tied or not."""

    def __init__(self, *, tied: bool, vocab: int = 128, width: int = 32) -> None:
        super().__init__()
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(vocab, width),
                "wpe": nn.Embedding(16, width),
                "h": nn.ModuleList(Block(width, 4) for _ in range(2)),
                "ln_f": nn.LayerNorm(width),
            }
        )
        self.lm_head = nn.Linear(width, vocab, bias=False)
        if tied:
            self.transformer.wte.weight = self.lm_head.weight

    def forward(
        self, idx: torch.Tensor, targets: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        _, t = idx.size()
        pos = torch.arange(0, t, dtype=torch.long, device=idx.device)
        x = self.transformer.wte(idx) + self.transformer.wpe(pos)
        for block in self.transformer.h:
            x = block(x)
        x = self.transformer.ln_f(x)
        if targets is not None:
            logits = self.lm_head(x)
            loss = F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1))
        else:
            logits, loss = self.lm_head(x[:, [-1], :]), None
        return logits, loss


class HeadFirst(nn.Module):
    """The head is registered before the embedding that it is tied to."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 50, bias=False)
        self.body = nn.Linear(8, 8)
        self.tokens = nn.Embedding(50, 8)
        self.head.weight = self.tokens.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(self.tokens(ids)))


class SharedLayers(nn.Module):
    """Two hidden layers share a weight: no head."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(50, 8)
        self.first, self.second, self.norm = nn.Linear(8, 8), nn.Linear(8, 8), nn.LayerNorm(8)
        self.second.weight = self.first.weight
        self.head = nn.Linear(8, 50)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.second(torch.relu(self.first(self.tokens(ids))))))


class EinsumExperts(nn.Module):
    """Experts in bare stacks, contracted by einsum."""

    def __init__(self, experts: int = 4, width: int = 8, inner: int = 12) -> None:
        super().__init__()
        self.router = nn.Linear(width, experts)
        self.w_in = nn.Parameter(torch.randn(experts, width, inner))
        self.b_in = nn.Parameter(torch.zeros(experts, inner))
        self.w_out = nn.Parameter(torch.randn(experts, width, inner))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gates = self.router(x).softmax(-1)
        hidden = F.gelu(torch.einsum("btd,edf->btef", x, self.w_in) + self.b_in)
        return torch.einsum("btef,edf,bte->btd", hidden, self.w_out, gates)


class BmmExperts(nn.Module):
    """Experts in bare stacks, contracted by bmm, gate and up in one."""

    def __init__(self, experts: int = 4, width: int = 8, inner: int = 12) -> None:
        super().__init__()
        self.gate_up = nn.Parameter(torch.randn(experts, width, 2 * inner))
        self.down = nn.Parameter(torch.randn(experts, inner, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = torch.bmm(x, self.gate_up).chunk(2, dim=-1)
        return torch.bmm(F.silu(gate) * up, self.down)


class LoopExperts(nn.Module):
    """Experts in bare stacks `[e, out, in]`, one `F.linear` each; gate and up interleaved."""

    def __init__(self, experts: int = 4, width: int = 8, inner: int = 12) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.randn(experts, width))
        self.gate_up = nn.Parameter(torch.randn(experts, 2 * inner, width))
        self.gate_up_bias = nn.Parameter(torch.randn(experts, 2 * inner))
        self.down = nn.Parameter(torch.randn(experts, width, inner))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores, chosen = F.linear(x, self.gate).topk(1, dim=-1)
        out = torch.zeros_like(x)
        for index in range(self.gate.shape[0]):
            rows = torch.where(chosen == index)[0]
            y = F.linear(x[rows], self.gate_up[index], self.gate_up_bias[index])
            y = F.silu(y[..., ::2]) * y[..., 1::2]
            out[rows] += F.linear(y, self.down[index])
        return out * scores


class GroupedQuery(nn.Module):
    """Grouped-query attention with q, k and v per group in one weight."""

    def __init__(self, width: int = 16, heads: int = 4, groups: int = 2) -> None:
        super().__init__()
        self.heads, self.groups, self.size = heads, groups, width // heads
        self.qkv = nn.Linear(width, (heads + 2 * groups) * self.size)
        self.out = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, _ = x.shape
        qkv = self.qkv(x).view(b, t, self.groups, self.heads // self.groups + 2, self.size)
        q, k, v = qkv.split([self.heads // self.groups, 1, 1], dim=3)
        y = F.scaled_dot_product_attention(q.flatten(2, 3), k.flatten(2, 3), v.flatten(2, 3))
        return self.out(y.reshape(b, t, -1))


class Rotary(nn.Module):
    """Separate q and k, whose halves are rotated in place: no fused matrices."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.q, self.k, self.out = nn.Linear(width, width), nn.Linear(width, width), nn.Linear(width, width)

    def rotate(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        x1, x2 = x.chunk(2, dim=-1)
        return torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        q, k = self.rotate(self.q(x), cos, sin), self.rotate(self.k(x), cos, sin)
        return self.out((q @ k.transpose(-1, -2)).softmax(-1) @ x)


class Recommender(nn.Module):
    """Tables for categories, two towers of layers, a last layer with one output."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(n, 8, mode="sum") for n in (10, 20))
        self.bottom = nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 8))
        self.top = nn.Sequential(nn.Linear(24, 16), nn.ReLU(), nn.Linear(16, 1), nn.Sigmoid())

    def forward(self, dense: torch.Tensor, sparse: torch.Tensor) -> torch.Tensor:
        parts = [self.bottom(dense)] + [table(sparse[:, i]) for i, table in enumerate(self.tables)]
        return self.top(torch.cat(parts, dim=1))


class Factorization(nn.Module):
    """Bare tables that are indexed."""

    def __init__(self) -> None:
        super().__init__()
        self.users = nn.Parameter(torch.randn(30, 8))
        self.items = nn.Parameter(torch.randn(40, 8))
        self.bias = nn.Parameter(torch.zeros(40, 1))

    def forward(self, user: torch.Tensor, item: torch.Tensor) -> torch.Tensor:
        return (self.users[user] * F.embedding(item, self.items)).sum(-1, keepdim=True) + self.bias[item]


class Vision(nn.Module):
    """Bare position tables, tokens and queries."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, width, 4, 4)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, width))
        self.pos_embed = nn.Parameter(torch.zeros(1, 65, width))
        self.queries = nn.Parameter(torch.zeros(7, width))
        self.row_bias = nn.Parameter(torch.zeros(31, 4))
        self.register_buffer("index", torch.zeros(65, 65, dtype=torch.long))
        self.cross = nn.MultiheadAttention(width, 4, batch_first=True)
        self.gain = nn.Parameter(torch.ones(width, 1))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 10)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        x = self.patch(image).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls_token.expand(x.size(0), -1, -1), x], dim=1) + self.pos_embed
        bias = self.row_bias[self.index.view(-1)].view(65, 65, -1).permute(2, 0, 1)
        x = x * self.gain.squeeze(-1) + bias.mean()
        queries = self.queries.unsqueeze(0).expand(x.size(0), -1, -1)
        y, _ = self.cross(queries, x, x)
        return self.head(self.norm(y).mean(1))


class ActorCritic(nn.Module):
    """A shared trunk with two heads, used through methods."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh())
        self.actor = nn.Linear(64, 2)
        self.critic = nn.Linear(64, 1)

    def forward(self, x: torch.Tensor) -> Never:
        raise NotImplementedError

    def act(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = self.trunk(x)
        return self.actor(h).softmax(-1), self.critic(h)


class VAE(nn.Module):
    """mu and logvar are returned too, but a later layer takes them: no heads."""

    def __init__(self) -> None:
        super().__init__()
        self.enc = nn.Linear(784, 64)
        self.mu, self.logvar = nn.Linear(64, 12), nn.Linear(64, 12)
        self.dec, self.out = nn.Linear(12, 64), nn.Linear(64, 784)

    def encode(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = F.relu(self.enc(x))
        return self.mu(h), self.logvar(h)

    def reparameterize(self, mu: torch.Tensor, logvar: torch.Tensor) -> torch.Tensor:
        return mu + torch.randn_like(mu) * torch.exp(0.5 * logvar)

    def decode(self, z: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(self.out(F.relu(self.dec(z))))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        mu, logvar = self.encode(x.view(-1, 784))
        return self.decode(self.reparameterize(mu, logvar)), mu, logvar


class Seq2Seq(nn.Module):
    """LSTM encoder, attention, LSTM cell; the chosen token is fed back."""

    def __init__(self, vocab: int = 40, width: int = 16) -> None:
        super().__init__()
        self.src, self.tgt = nn.Embedding(vocab, width), nn.Embedding(vocab, width)
        self.encoder = nn.LSTM(width, width, batch_first=True)
        self.score = nn.Linear(2 * width, width)
        self.v = nn.Parameter(torch.rand(width))
        self.cell = nn.LSTMCell(2 * width, width)
        self.fc_out = nn.Linear(width, vocab)

    def forward(self, src: torch.Tensor, trg: torch.Tensor, ratio: float = 0.5) -> torch.Tensor:
        memory, (h, c) = self.encoder(self.src(src))
        h, c = h[0], c[0]
        outputs = torch.zeros(trg.shape[1], trg.shape[0], 40)
        token = trg[:, 0]
        for t in range(1, trg.shape[1]):
            energy = torch.tanh(self.score(torch.cat((h.unsqueeze(1).expand_as(memory), memory), dim=2)))
            weights = (energy @ self.v).softmax(-1)
            context = torch.bmm(weights.unsqueeze(1), memory).squeeze(1)
            h, c = self.cell(torch.cat((self.tgt(token), context), dim=1), (h, c))
            prediction = self.fc_out(h)
            outputs[t] = prediction
            token = trg[:, t] if ratio > 0.5 else prediction.argmax(1)
        return outputs


class MixerBlock(nn.Module):
    """A block of an MLP-Mixer."""

    def __init__(self, tokens: int, width: int) -> None:
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.token = nn.Sequential(nn.Linear(tokens, 32), nn.GELU(), nn.Linear(32, tokens))
        self.channel = nn.Sequential(nn.Linear(width, 64), nn.GELU(), nn.Linear(64, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.token(self.n1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.channel(self.n2(x))


class Encoder(nn.Module):
    """No norm at the end, and no head: the last projection has a hidden width."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(MixerBlock(9, 16), MixerBlock(9, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks(x)


class DiT(nn.Module):
    """Conditioning by one layer that makes six; a final layer that makes patches."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.x_embed = nn.Linear(8, width)
        self.ada = nn.Sequential(nn.SiLU(), nn.Linear(width, 6 * width))
        self.norm = nn.LayerNorm(width, elementwise_affine=False)
        self.attn, self.mlp = nn.Linear(width, width), nn.Linear(width, width)
        self.final_norm = nn.LayerNorm(width)
        self.final_ada = nn.Sequential(nn.SiLU(), nn.Linear(width, 2 * width))
        self.final = nn.Linear(width, 8)

    def forward(self, x: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        x = self.x_embed(x)
        s1, k1, g1, s2, k2, g2 = self.ada(c).chunk(6, dim=1)
        x = x + g1.unsqueeze(1) * self.attn(self.norm(x) * (1 + k1.unsqueeze(1)) + s1.unsqueeze(1))
        x = x + g2.unsqueeze(1) * self.mlp(self.norm(x) * (1 + k2.unsqueeze(1)) + s2.unsqueeze(1))
        shift, scale = self.final_ada(c).chunk(2, dim=1)
        return self.final(self.final_norm(x) * (1 + scale.unsqueeze(1)) + shift.unsqueeze(1))


class GraphConv(nn.Module):
    """A graph convolution with a bare weight `[in, out]`."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(inputs, outputs))
        self.bias = nn.Parameter(torch.zeros(outputs))

    def forward(self, x: torch.Tensor, adjacency: torch.Tensor) -> torch.Tensor:
        return torch.spmm(adjacency, torch.mm(x, self.weight)) + self.bias


class GCN(nn.Module):
    """Two graph convolutions, the last of which makes classes."""

    def __init__(self) -> None:
        super().__init__()
        self.gc1, self.gc2 = GraphConv(20, 16), GraphConv(16, 7)

    def forward(self, x: torch.Tensor, adjacency: torch.Tensor) -> torch.Tensor:
        x = F.dropout(F.relu(self.gc1(x, adjacency)), 0.5, training=self.training)
        return F.log_softmax(self.gc2(x, adjacency), dim=1)


class BitLinear(nn.Linear):
    """A linear layer that quantizes its weight."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = 1.0 / self.weight.abs().mean().clamp(min=1e-5)
        quantized = self.weight + ((self.weight * scale).round().clamp(-1, 1) / scale - self.weight).detach()
        return F.linear(x, quantized, self.bias)


class LoRALinear(nn.Module):
    """A low-rank adapter written by hand."""

    def __init__(self, inputs: int, outputs: int, rank: int = 2) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, outputs)
        self.lora_a = nn.Parameter(torch.randn(rank, inputs))
        self.lora_b = nn.Parameter(torch.zeros(outputs, rank))
        self.scale = nn.Parameter(torch.ones(outputs, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.linear.weight + self.scale * (self.lora_b @ self.lora_a)
        return F.linear(x, weight, self.linear.bias)


class Adapted(nn.Module):
    """A body of unusual layers under an ordinary head."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = BitLinear(8, 8), LoRALinear(8, 8)
        self.bilinear = nn.Bilinear(8, 8, 6)
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.second(torch.relu(self.first(x)))
        return self.head(self.norm(self.bilinear(x, x)))


class StateSpace(nn.Module):
    """Mamba's mixer, in short."""

    def __init__(self, width: int = 8, inner: int = 16, state: int = 4, rank: int = 2) -> None:
        super().__init__()
        self.rank, self.state = rank, state
        self.in_proj = nn.Linear(width, 2 * inner, bias=False)
        self.conv1d = nn.Conv1d(inner, inner, 4, groups=inner, padding=3)
        self.x_proj = nn.Linear(inner, rank + 2 * state, bias=False)
        self.dt_proj = nn.Linear(rank, inner)
        self.A_log = nn.Parameter(torch.randn(inner, state))
        self.D = nn.Parameter(torch.ones(inner))
        self.out_proj = nn.Linear(inner, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, z = self.in_proj(x).chunk(2, dim=-1)
        x = F.silu(self.conv1d(x.transpose(1, 2))[..., : z.shape[1]].transpose(1, 2))
        a = -torch.exp(self.A_log.float())
        delta, b, c = self.x_proj(x).split([self.rank, self.state, self.state], dim=-1)
        delta = F.softplus(self.dt_proj(delta))
        h = torch.zeros(x.shape[0], *a.shape)
        outs = []
        for t in range(x.shape[1]):
            h = torch.exp(delta[:, t, :, None] * a) * h + (delta * x)[:, t, :, None] * b[:, t, None, :]
            outs.append((h * c[:, t, None, :]).sum(-1))
        return self.out_proj((torch.stack(outs, 1) + x * self.D) * F.silu(z))


class UNet(nn.Module):
    """Convolutions down and up, with a skip."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU())
        self.middle = nn.Conv2d(16, 16, 3, padding=1, groups=4)
        self.depthwise = nn.Conv2d(16, 16, 3, padding=1, groups=16)
        self.up = nn.ConvTranspose2d(16, 16, 2, 2)
        self.out = nn.Conv2d(32, 3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skip = self.down(x)
        x = self.up(F.max_pool2d(self.depthwise(self.middle(skip)), 2))
        return self.out(torch.cat([skip, x], dim=1))


class Siamese(nn.Module):
    """Two inputs through one network."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 8, 3)
        self.fc1, self.fc2 = nn.Linear(8, 32), nn.Linear(32, 5)

    def forward_once(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.conv(x)).mean((2, 3))
        return self.fc2(F.relu(self.fc1(x)))

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.forward_once(a), self.forward_once(b)


class DeepHead(nn.Module):
    """An untied functional head, and layers that are reached by name or in a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(50, 8)
        for i in range(3):
            setattr(self, f"layer{i}", nn.Linear(8, 8))
        self.norm = nn.LayerNorm(8)
        self.tasks = nn.ModuleDict({"a": nn.Linear(8, 3), "b": nn.Linear(8, 4)})
        self.matrices = nn.ParameterList(nn.Parameter(torch.randn(8, 8)) for _ in range(2))

    def forward(self, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.tokens(ids) * math.sqrt(8)
        for i in range(3):
            x = F.gelu(getattr(self, f"layer{i}")(x))
        for matrix in self.matrices:
            x = x @ matrix
        x = self.norm(x)
        return {name: head(x) for name, head in self.tasks.items()}


class FunctionalHead(nn.Module):
    """A bare head `[width, vocab]`, and attention by einsum with heads in the weight."""

    def __init__(self, vocab: int = 50, width: int = 8, heads: int = 2, size: int = 4) -> None:
        super().__init__()
        self.tokens = nn.Parameter(torch.randn(vocab, width))
        self.positions = nn.Parameter(torch.randn(16, width))
        self.w_q = nn.Parameter(torch.randn(width, heads, size))
        self.w_kv = nn.Parameter(torch.randn(width, 2 * heads * size))
        self.w_o = nn.Parameter(torch.randn(heads, size, width))
        self.gamma = nn.Parameter(torch.ones(width))
        self.unembed = nn.Parameter(torch.randn(width, vocab))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens[ids] + self.positions[: ids.shape[1]]
        q = torch.einsum("btm,mhd->bhtd", x, self.w_q)
        k, v = (x @ self.w_kv).chunk(2, dim=-1)
        k, v = (t.unflatten(-1, (2, 4)).transpose(1, 2) for t in (k, v))
        y = (q @ k.transpose(-1, -2)).softmax(-1) @ v
        x = x + torch.einsum("bhtd,hdm->btm", y, self.w_o)
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.gamma
        return x @ self.unembed


class StateSpaceModel(nn.Module):
    """A language model of one state-space mixer."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.mixer, self.norm = nn.Embedding(50, 8), StateSpace(), nn.LayerNorm(8)
        self.head = nn.Linear(8, 50, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids)
        return self.head(self.norm(x + self.mixer(x)))


# What is not listed has one dimension and is element-wise.
EXPECTED = {
    "gpt, untied": (
        lambda: HandGPT(tied=False),
        {
            "transformer.wte.weight": E,
            "transformer.wpe.weight": E,
            **{f"transformer.h.{i}.c_attn.weight": split(32, 32, 32) for i in range(2)},
            **{f"transformer.h.{i}.c_proj.weight": M for i in range(2)},
            **{f"transformer.h.{i}.mlp.{j}.weight": M for i in range(2) for j in (0, 2)},
            "lm_head.weight": O,
        },
    ),
    "gpt, tied": (
        lambda: HandGPT(tied=True),
        {
            "transformer.wte.weight": E,
            "transformer.wpe.weight": E,
            **{f"transformer.h.{i}.c_attn.weight": split(32, 32, 32) for i in range(2)},
            **{f"transformer.h.{i}.c_proj.weight": M for i in range(2)},
            **{f"transformer.h.{i}.mlp.{j}.weight": M for i in range(2) for j in (0, 2)},
        },
    ),
    "tied head registered first": (HeadFirst, {"head.weight": E, "body.weight": M}),
    "hidden layers share a weight": (
        SharedLayers,
        {"tokens.weight": E, "first.weight": M, "head.weight": O},
    ),
    "experts by einsum": (
        lambda: nn.Sequential(EinsumExperts(), nn.LayerNorm(8), nn.Linear(8, 3)),
        {
            "0.router.weight": M,
            "0.w_in": MatrixView(batch_dims=1, transposed=True),
            "0.b_in": X,
            "0.w_out": MatrixView(batch_dims=1),
            "2.weight": O,
        },
    ),
    "experts by bmm": (
        lambda: nn.Sequential(BmmExperts(), nn.LayerNorm(8), nn.Linear(8, 3)),
        {
            "0.gate_up": split(12, 12, batch_dims=1, transposed=True),
            "0.down": MatrixView(batch_dims=1, transposed=True),
            "2.weight": O,
        },
    ),
    "experts one by one": (
        lambda: torch.nn.Sequential(LoopExperts(), torch.nn.LayerNorm(8), torch.nn.Linear(8, 3)),
        {
            "0.gate": M,
            "0.gate_up": split(1, 1, batch_dims=1),
            "0.gate_up_bias": X,
            "0.down": MatrixView(batch_dims=1),
            "2.weight": O,
        },
    ),
    "recommender": (
        Recommender,
        {
            "tables.0.weight": E,
            "tables.1.weight": E,
            "bottom.0.weight": M,
            "bottom.2.weight": M,
            "top.0.weight": M,
            "top.2.weight": O,
        },
    ),
    "bare tables": (Factorization, {"users": E, "items": E, "bias": X}),
    "vision": (
        Vision,
        {
            "cls_token": X,
            "pos_embed": X,
            "queries": X,
            "row_bias": X,
            "gain": X,
            "patch.weight": M,
            "cross.in_proj_weight": split(16, 16, 16),
            "cross.out_proj.weight": M,
            "head.weight": O,
        },
    ),
    "actor and critic": (
        ActorCritic,
        {"trunk.0.weight": M, "trunk.2.weight": M, "actor.weight": O, "critic.weight": O},
    ),
    "variational autoencoder": (
        VAE,
        {"enc.weight": M, "mu.weight": M, "logvar.weight": M, "dec.weight": M, "out.weight": O},
    ),
    "sequence to sequence": (
        Seq2Seq,
        {
            "src.weight": E,
            "tgt.weight": E,
            "encoder.weight_ih_l0": split(16, 16, 16, 16),
            "encoder.weight_hh_l0": split(16, 16, 16, 16),
            "score.weight": M,
            "cell.weight_ih": split(16, 16, 16, 16),
            "cell.weight_hh": split(16, 16, 16, 16),
            "fc_out.weight": O,
        },
    ),
    "mixer without a head": (
        Encoder,
        {f"blocks.{i}.{part}.{j}.weight": M for i in (0, 1) for part in ("token", "channel") for j in (0, 2)},
    ),
    "diffusion transformer": (
        DiT,
        {
            "x_embed.weight": M,
            "ada.1.weight": split(*[16] * 6),
            "attn.weight": M,
            "mlp.weight": M,
            "final_ada.1.weight": split(16, 16),
            "final.weight": O,
        },
    ),
    "graph convolutions": (GCN, {"gc1.weight": T, "gc2.weight": O}),
    "unusual layers": (
        Adapted,
        {
            "first.weight": M,
            "second.lora_a": M,
            "second.lora_b": M,
            "second.scale": X,
            "second.linear.weight": M,
            "bilinear.weight": M,
            "head.weight": O,
        },
    ),
    "state space": (
        StateSpaceModel,
        {
            "tokens.weight": E,
            "mixer.in_proj.weight": split(16, 16),
            "mixer.conv1d.weight": X,
            "mixer.x_proj.weight": split(2, 4, 4),
            "mixer.dt_proj.weight": M,
            "mixer.A_log": X,
            "mixer.out_proj.weight": M,
            "head.weight": O,
        },
    ),
    "u-net": (
        UNet,
        {
            "down.0.weight": M,
            "middle.weight": split(4, 4, 4, 4),
            "depthwise.weight": X,
            "up.weight": T,
            "out.weight": O,
        },
    ),
    "siamese": (Siamese, {"conv.weight": M, "fc1.weight": M, "fc2.weight": O}),
    "layers by name, heads in a dictionary": (
        DeepHead,
        {
            "tokens.weight": E,
            **{f"layer{i}.weight": M for i in range(3)},
            "tasks.a.weight": O,
            "tasks.b.weight": O,
            "matrices.0": T,
            "matrices.1": T,
        },
    ),
    "everything functional": (
        FunctionalHead,
        {
            "tokens": E,
            "positions": X,
            "w_q": T,
            "w_kv": split(8, 8, transposed=True),
            "w_o": MatrixView(transposed=True, first_dims=2),
            "unembed": O,
        },
    ),
}
