"""The GPT, and what megaopt sees in it."""

from __future__ import annotations

import math

import pytest
import torch
from megaopt_tools.model import GPT, Attention, FeedForward, Shape, build_model, loss_of
from megaopt_tools.text import builtin_text
from torch.nn import functional

from megaopt_core import OptimizerConfig, Role, route

SMALL = Shape(width=32, layers=2, heads=2, expansion=48)
BATCH = torch.zeros(1, 8, dtype=torch.int64)


def test_size_is_between_four_hundred_thousand_and_a_million() -> None:
    """Small enough for two cores, large enough that optimizers differ."""
    assert 400_000 < sum(param.numel() for param in build_model(Shape(), 0).parameters()) < 1_000_000


def test_first_loss_is_that_of_uniform_guesses() -> None:
    """An untrained model knows nothing: ln 256 nats a byte."""
    tokens = builtin_text().train[:257].long()
    loss = loss_of(build_model(SMALL, 0), tokens[None, :-1], tokens[None, 1:])
    assert loss.item() == pytest.approx(math.log(256), abs=1e-5)


def test_weights_depend_on_the_seed_alone() -> None:
    """The same seed gives the same bits, and torch's own random state is left alone."""
    before = torch.get_rng_state()
    one, two, other = (build_model(SMALL, seed).state_dict() for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert not torch.equal(one["embedding.weight"], other["embedding.weight"])


def _with_head(seed: int) -> GPT:
    """A model whose logits differ."""
    model = build_model(SMALL, seed)
    torch.nn.init.normal_(model.head.weight, generator=torch.Generator().manual_seed(seed))
    return model


def test_no_position_sees_what_follows() -> None:
    """Changing a byte changes the logits from its position on, and none before."""
    model = _with_head(0)
    tokens = torch.arange(20)[None] * 7
    changed = tokens.clone()
    changed[0, 12] = 255
    before, after = model(tokens), model(changed)
    assert torch.equal(before[0, :12], after[0, :12])
    assert not torch.isclose(before[0, 12:], after[0, 12:]).all(dim=-1).any()


def test_attention_is_the_formula_written_out() -> None:
    """softmax(Q K^T / sqrt(d)) V per head, with rotated queries and keys, in float64."""
    torch.manual_seed(0)
    attention = Attention(SMALL).double()
    x = torch.randn(3, 7, SMALL.width, dtype=torch.float64)
    length, width = 7, SMALL.width // SMALL.heads
    frequencies = 10_000.0 ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
    angles = torch.arange(length, dtype=torch.float64)[:, None] * frequencies
    turn = torch.polar(torch.ones_like(angles), angles)

    def rotate(part: torch.Tensor) -> torch.Tensor:
        half = width // 2
        turned = torch.complex(part[..., :half], part[..., half:]) * turn
        return torch.cat([turned.real, turned.imag], dim=-1)

    weight = attention.qkv.weight
    expected = torch.zeros_like(x)
    for head in range(SMALL.heads):
        rows = [
            slice(part * SMALL.width + head * width, part * SMALL.width + (head + 1) * width)
            for part in range(3)
        ]
        query, key, value = (x @ weight[part].T for part in rows)
        scores = rotate(query) @ rotate(key).mT / math.sqrt(width)
        scores = scores.masked_fill(torch.ones(length, length).triu(1).bool(), -math.inf)
        out = attention.out.weight[:, head * width : (head + 1) * width]
        expected += scores.softmax(dim=-1) @ value @ out.T
    doubled = angles.repeat(1, 2)
    actual = attention(x, torch.stack([doubled.cos(), doubled.sin()]))
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)


def test_feed_forward_is_the_formula_written_out() -> None:
    """W_down (silu(W_gate x) * W_up x)."""
    torch.manual_seed(0)
    layer = FeedForward(SMALL).double()
    x = torch.randn(5, SMALL.width, dtype=torch.float64)
    gate, up = layer.gate_up.weight.split(SMALL.expansion)
    expected = (functional.silu(x @ gate.T) * (x @ up.T)) @ layer.down.weight.T
    torch.testing.assert_close(layer(x), expected, rtol=1e-12, atol=1e-12)


def test_fused_weights_are_seen_as_the_matrices_they_hold() -> None:
    """Query, key and value are three matrices, gate and up two; a matrix optimizer takes each by itself."""
    routing = route(OptimizerConfig(optimizer="adam", lr=1e-3), build_model(SMALL, 0), example=BATCH)
    shapes = {}
    for name, entry in routing.params.items():
        view = entry.decision.view
        shapes[name] = () if view is None else view.matrix_shapes(entry.spec.shape)
    width, hidden = SMALL.width, SMALL.expansion
    for block in ("blocks.0", "blocks.1"):
        assert shapes[f"{block}.attention.qkv.weight"] == ((width, width),) * 3
        assert shapes[f"{block}.attention.out.weight"] == ((width, width),)
        assert shapes[f"{block}.feed_forward.gate_up.weight"] == ((hidden, width),) * 2
        assert shapes[f"{block}.feed_forward.down.weight"] == ((width, hidden),)
    assert sum(map(bool, shapes.values())) == 8


def test_every_role_is_found_without_a_guess() -> None:
    """Embedding, head, norms and hidden matrices are told apart, and none of them is uncertain."""
    routing = route(OptimizerConfig(optimizer="adam", lr=1e-3), build_model(SMALL, 0), example=BATCH)
    roles = {name: entry.decision.role for name, entry in routing.params.items()}
    assert roles["embedding.weight"] is Role.EMBEDDING
    assert roles["head.weight"] is Role.OUTPUT
    assert roles["norm.weight"] is roles["blocks.0.norm_attention.weight"] is Role.ELEMENTWISE
    assert not any(entry.decision.uncertain for entry in routing.params.values())
