"""How many rows of a projection make a head, as its forward shapes the output."""

from collections.abc import Iterator
from types import ModuleType

import pytest
import torch
from torch import nn

from megaopt_core.params import Doubt, Role
from megaopt_core.routing import infer_roles

WIDTH, HEADS, HEAD = 24, 3, 8


class Attention(nn.Module):
    """Attention whose subclasses say how outputs of projections become heads."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.out = nn.Linear(WIDTH, WIDTH)
        self.heads, self.head_dim = HEADS, HEAD

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return (q @ k.transpose(-2, -1)).softmax(-1) @ v

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, c = x.shape
        q, k, v = (self.shaped(layer(x)) for layer in (self.q, self.k, self.v))
        return self.out(self.attend(q, k, v).transpose(1, 2).reshape(b, t, c))


class ByNumber(Attention):
    def shaped(self, y: torch.Tensor) -> torch.Tensor:
        return y.view(y.shape[0], y.shape[1], self.heads, -1).transpose(1, 2)


class BySize(Attention):
    def shaped(self, y: torch.Tensor) -> torch.Tensor:
        return y.view(*y.shape[:-1], -1, self.head_dim).transpose(1, 2)


class Unflattened(Attention):
    def shaped(self, y: torch.Tensor) -> torch.Tensor:
        return y.unflatten(-1, (self.heads, self.head_dim)).transpose(1, 2)


class Rotated(Attention):
    """Rotary embeddings shape a head once more."""

    def shaped(self, y: torch.Tensor) -> torch.Tensor:
        y = y.view(*y.shape[:-1], self.heads, self.head_dim)
        pairs = y.reshape(*y.shape[:-1], -1, 2)
        return torch.stack((-pairs[..., 1], pairs[..., 0]), -1).flatten(-2).transpose(1, 2)


class Plain(Attention):
    """One head: nothing is shaped."""

    def shaped(self, y: torch.Tensor) -> torch.Tensor:
        return y


class Fused(nn.Module):
    """Query, key and value in one, of several layouts."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, c = x.shape
        q, k, v = self.parts(self.qkv(x), b, t)
        y = (q @ k.transpose(-2, -1)).softmax(-1) @ v
        return self.out(y.transpose(1, 2).reshape(b, t, c))


class SideBySide(Fused):
    def parts(self, y: torch.Tensor, b: int, t: int) -> Iterator[torch.Tensor]:
        return (part.view(b, t, HEADS, HEAD).transpose(1, 2) for part in y.chunk(3, -1))


class AtOnce(Fused):
    def parts(self, y: torch.Tensor, b: int, t: int) -> torch.Tensor:
        return y.view(b, t, 3, HEADS, HEAD).permute(2, 0, 3, 1, 4)


class HeadByHead(Fused):
    def parts(self, y: torch.Tensor, b: int, t: int) -> Iterator[torch.Tensor]:
        return (part.transpose(1, 2) for part in y.view(b, t, HEADS, 3 * HEAD).chunk(3, -1))


class Conv1D(nn.Module):
    """GPT-2's layer, whose weight is stored `[in, out]`."""

    def __init__(self, nf: int, nx: int) -> None:
        super().__init__()
        self.nf, self.nx = nf, nx
        self.weight, self.bias = nn.Parameter(torch.zeros(nx, nf)), nn.Parameter(torch.zeros(nf))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight).view(*x.shape[:-1], self.nf)


class Transposed(SideBySide):
    """Of such layers."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = Conv1D(3 * WIDTH, WIDTH), Conv1D(WIDTH, WIDTH)


class Biased(ByNumber):
    """Scores grow or fall with a number for each distance and head, as T5's do."""

    def __init__(self) -> None:
        super().__init__()
        self.distance = nn.Embedding(32, HEADS)

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        places = torch.arange(q.shape[-2])
        bias = self.distance((places[:, None] - places).abs()).permute(2, 0, 1)
        return (q @ k.transpose(-2, -1) + bias).softmax(-1) @ v


class Latent(nn.Module):
    """Latent attention: keys and values of all heads come from a few features, positions go beside them."""

    def __init__(self, value: int = 6) -> None:
        super().__init__()
        self.value = value
        self.q, self.kv_a = nn.Linear(WIDTH, HEADS * (8 + 4)), nn.Linear(WIDTH, 10 + 4)
        self.kv_b, self.out = nn.Linear(10, HEADS * (8 + value)), nn.Linear(HEADS * value, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, _ = x.shape
        plain, turned = self.q(x).view(b, t, HEADS, 12).transpose(1, 2).split([8, 4], -1)
        latent, positions = self.kv_a(x).split([10, 4], -1)
        k, v = self.kv_b(latent).view(b, t, HEADS, 8 + self.value).transpose(1, 2).split([8, self.value], -1)
        k = torch.cat((k, positions.unsqueeze(1).expand(-1, HEADS, -1, -1)), -1)
        scores = torch.cat((plain, turned), -1) @ k.transpose(-2, -1)
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).reshape(b, t, -1))


@pytest.mark.parametrize("value", [6, 8])
def test_output_projections_of_latent_attention_take_heads(value):
    """Their columns are the values of a head, however large its queries are."""
    found = infer_roles(nn.Sequential(Latent(value), nn.LayerNorm(WIDTH), Latent(value)))
    assert {found[f"{layer}.out.weight"].view.head_columns for layer in (0, 2)} == {value}


def heads(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Return the head sizes of every matrix that has any."""
    decisions = infer_roles(model)
    return {name: decision.view.head_sizes for name, decision in decisions.items() if decision.view}


@pytest.mark.parametrize("cls", [ByNumber, BySize, Unflattened, Rotated])
def test_heads_of_projections(cls):
    """Query, key and value have heads of eight rows; the output projection has none."""
    expected = {f"{name}.weight": (HEAD,) for name in "qkv"} | {"out.weight": ()}
    assert heads(cls()) == expected


TAKEN = [ByNumber, BySize, Unflattened, Rotated, SideBySide, AtOnce, HeadByHead, Transposed, Biased]


@pytest.mark.parametrize("cls", TAKEN)
def test_output_projections_take_heads(cls):
    """What comes from queries, keys and values of heads has heads along its columns."""
    found = infer_roles(nn.Sequential(cls(), nn.LayerNorm(WIDTH), cls()))
    assert [found[f"{layer}.out.weight"].view.head_columns for layer in (0, 2)] == [HEAD, HEAD]


def test_what_takes_no_heads_has_no_columns_by_head():
    """Nor is there a guess."""
    assert {decision.view.head_columns for decision in infer_roles(Plain()).values() if decision.view} == {0}


@pytest.mark.parametrize("cls", [SideBySide, AtOnce, HeadByHead])
def test_heads_of_fused_projections(cls):
    """Each of the three parts has heads of eight rows, whichever way they lie."""
    assert heads(cls()) == {"qkv.weight": (HEAD,) * 3, "out.weight": ()}


def test_what_is_not_shaped_has_no_heads():
    """Nothing is guessed from widths."""
    assert set(heads(Plain()).values()) == {()}


def test_layers_alike_have_heads_alike():
    """What was read of one layer holds for its twins."""
    model = nn.Sequential(BySize(), BySize())
    found = heads(model)
    assert [found[f"{layer}.q.weight"] for layer in (0, 1)] == [(HEAD,), (HEAD,)]


def test_a_policy_as_wide_as_the_last_action(generated_models: ModuleType) -> None:
    """One-hot codes of an action are no stream that a prediction of the next one adds to: no certain matrix."""
    made = "self.last, self.core, self.policy = nn.Linear(9, 8, bias=False), nn.LSTMCell(8, 16), nn.Linear(16, 9)"
    forward = (
        "state = state or (x.new_zeros(2, 16), x.new_zeros(2, 16))\n"
        "h, c = self.core(self.last(F.one_hot(action, 9).float()), state)\nlogits = self.policy(h)\n"
        "if self.training:\n    return torch.distributions.Categorical(logits=logits), (h, c)\n"
        "return logits.argmax(-1), (h, c)"
    )
    with torch.device("meta"):
        found = infer_roles(generated_models.model_with_forward(made, "x, action, state=None", forward)())
    policy = found["policy.weight"]
    assert policy.role is Role.OUTPUT or policy.doubt is Doubt.ROLE, policy.reason
