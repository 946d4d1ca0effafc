"""Steps on a GPU against torch's and against formulas in float64."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from device_training import PRECISIONS, build, everything, model_of, relative, train
from megaopt_lowbit.blocks import BlockCode


@pytest.mark.parametrize(("name", "cls"), [("adam", torch.optim.AdamW), ("sgd", torch.optim.SGD)])
def test_steps_are_torchs_bit_for_bit(device, name, cls):
    """The fused kernel on both sides."""
    model, plain_model = model_of(device), model_of(device)
    optimizer = build(model, name, clip_grad=0.0, overrides={})
    extra = {} if name == "adam" else {"momentum": 0.9}
    plain = cls(plain_model.parameters(), lr=2.0**-7, weight_decay=0.125, fused=True, **extra)
    train(model, optimizer, range(5))
    train(plain_model, plain, range(5))
    for param, other in zip(model.parameters(), plain_model.parameters(), strict=True):
        assert torch.equal(param, other)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", ["adam", "muon"])
def test_a_gpu_trains_as_a_cpu_does(device, name, precision):
    """To what fp32 arithmetic in another order leaves, and half a code of 8 bits."""
    runs = []
    for where in (device, torch.device("cpu")):
        model = model_of(where, precision)
        optimizer = build(model, name, **PRECISIONS[precision], muon_fp32_matmul_prec="highest")
        train(model, optimizer, range(3))
        runs.append(everything(model, optimizer))
    keys = [key for key in runs[0] if precision == "fp32" or key.endswith("main_param")]
    limit = 1e-2 if precision == "8bit" else 1e-4
    assert relative(*({key: run[key] for key in keys} for run in runs)) <= limit


def test_the_norm_is_that_of_float64(device):
    """And clipping brings it to the bound."""
    model = model_of(device, width=256)
    optimizer = build(model, "adam", clip_grad=1.0)
    for step, param in enumerate(model.parameters()):
        chance = torch.Generator().manual_seed(step)
        param.grad = torch.randn(param.shape, generator=chance).to(device)
    expected = sum(param.grad.double().square().sum() for param in model.parameters()).sqrt().item()
    assert optimizer.step().grad_norm == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("positive", [False, True])
def test_codes_of_eight_bits_are_those_of_a_cpu(device, positive):
    """The same bytes and scales."""
    value = torch.randn(10_000, generator=torch.Generator().manual_seed(0))
    value = value.square() if positive else value
    entropy = torch.randn(10_000, generator=torch.Generator().manual_seed(1))
    for stochastic in (False, True):
        code = BlockCode(positive, stochastic)
        here, there = code.encode(value.to(device), entropy.to(device)), code.encode(value, entropy)
        assert torch.equal(here[1].cpu(), there[1])
        # A quotient that falls on a midpoint may be rounded to either side.
        assert (here[0].cpu() != there[0]).float().mean() < 1e-3


def test_an_infinite_gradient_skips_the_step(device):
    """Nothing changes on the device."""
    model = model_of(device, "main")
    optimizer = build(model, "adam", **PRECISIONS["main"])
    train(model, optimizer, range(2))
    before = everything(model, optimizer)
    for param in model.parameters():
        param.grad = torch.full_like(param, float("inf"))
    assert not optimizer.step().update_successful
    assert relative(before, everything(model, optimizer)) == 0.0
