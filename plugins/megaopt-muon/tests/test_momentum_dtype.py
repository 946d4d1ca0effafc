"""Muon's momentum in fewer bits."""

from collections.abc import Iterable

import pytest
import torch
from megaopt_lowbit.scaled import ScaledCode
from megaopt_muon.muon import TensorParallelMuon
from torch import nn

from megaopt_core import build_optimizer
from megaopt_core.optimizers import MegatronOptimizer

pytestmark = pytest.mark.any_python


def make(name: str, dtype: torch.dtype, seed: int = 0) -> tuple[nn.Sequential, MegatronOptimizer]:
    """Return a matrix and the optimizer of its name, with its momentum in a dtype."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 5, bias=False), nn.Linear(5, 8, bias=False))
    optimizer = build_optimizer(
        model, name, lr=0.02, weight_decay=0.0, clip_grad=0.0, overrides={},
        muon_fp32_matmul_prec="highest", use_precision_aware_optimizer=True, muon_momentum_dtype=dtype,
    )  # fmt: skip
    return model, optimizer


def train(model: nn.Module, optimizer: MegatronOptimizer, steps: Iterable[int]) -> None:
    """Give gradients that depend on the step alone."""
    for step in steps:
        chance = torch.Generator().manual_seed(step)
        for param in model.parameters():
            param.grad = torch.randn(param.shape, generator=chance)
        optimizer.step()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_momentum_is_rounded_between_steps_and_nothing_else(dtype):
    """As the class itself whose buffers are rounded by hand, bit for bit."""
    model, optimizer = make("muon", dtype)
    torch.manual_seed(0)
    plain_model = nn.Sequential(nn.Linear(6, 5, bias=False), nn.Linear(5, 8, bias=False))
    plain = TensorParallelMuon(
        plain_model.parameters(), lr=0.02, weight_decay=0.0, nesterov=False, fp32_matmul_prec="highest",
        tp_mode="blockwise",
    )  # fmt: skip
    code = ScaledCode(dtype)
    for step in range(4):
        train(model, optimizer, [step])
        train(plain_model, plain, [step])
        for state in plain.state.values():
            state["momentum_buffer"] = code.decode(*code.encode(state["momentum_buffer"]))
    (part,) = [part for part in optimizer.parts if isinstance(part.inner, TensorParallelMuon)]
    assert {state["momentum_buffer"].dtype for state in part.inner.state.values()} == {dtype}
    stepped = [shard.name for piece in part.pieces for _, shard in piece.spec.members]
    assert stepped
    for name in stepped:
        assert torch.equal(model.get_parameter(name), plain_model.get_parameter(name))


@pytest.mark.parametrize("name", ["muon", "adaptive_muon"])
def test_a_momentum_in_fewer_bits_resumes(tmp_path, name):
    """Three steps, a save, a load and three steps are six, bit for bit; second moments stay in fp32."""
    model, optimizer = make(name, "fp16")
    train(model, optimizer, range(3))
    files = pytest.importorskip("megaopt_checkpoint")
    files.save_checkpoint(tmp_path / "last", model, optimizer)
    other_model, other = make(name, "fp16", seed=1)
    files.load_checkpoint(tmp_path / "last", other_model, other)
    train(model, optimizer, range(3, 6))
    train(other_model, other, range(3, 6))
    for mine, theirs in zip(model.parameters(), other_model.parameters(), strict=True):
        assert torch.equal(mine, theirs)
        for key, value in optimizer.state[mine].items():
            assert torch.equal(value, other.state[theirs][key])
            assert value.dtype is torch.float32
