"""Weights, gradients and states may lie in any order in memory: what is trained does not depend on it."""

import warnings
from typing import Any

import pytest
import torch
from torch import nn

from megaopt_core import build_optimizer

pytestmark = pytest.mark.any_python


def model(dtype: torch.dtype) -> Any:
    """Return a convolution and two matrices, without a forward pass."""
    torch.manual_seed(0)
    return nn.ModuleList([nn.Conv2d(3, 4, 3), nn.Linear(16, 3), nn.Linear(3, 5)]).to(dtype)


def nothing(module: nn.ModuleList) -> None:
    """Leave all as it is."""


def channels_last(module: nn.ModuleList) -> None:
    """Convert to the memory format of images."""
    module.to(memory_format=torch.channels_last)


def transposed(module: nn.ModuleList) -> None:
    """Make the matrices views of transposed memory."""
    for layer in (module[1], module[2]):
        layer.weight.data = layer.weight.data.t().contiguous().t()


def with_holes(module: nn.ModuleList) -> None:
    """Make the matrices every other column of wider memory, whose other columns nobody may touch."""
    for layer in (module[1], module[2]):
        wide = torch.stack([layer.weight.data, torch.full_like(layer.weight.data, 7.0)], -1)
        layer.weight.data = wide[..., 0]
        layer.wide = wide


def trained(
    optimizer: Any,
    dtype: torch.dtype,
    settings: dict[str, Any],
    change: Any,
    when: int,
    *,
    swapped: bool = False,
) -> Any:
    """Return a model after six steps with given gradients."""
    module = model(dtype)
    if when == 0:
        change(module)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        built = build_optimizer(module, optimizer, lr=0.01, weight_decay=0.1, **settings)
    for step in range(6):
        if step == when and step:
            change(module)
        torch.manual_seed(step)
        for param in module.parameters():
            grad = torch.randn(param.shape)
            param.grad = (grad.t().contiguous().t() if swapped and grad.dim() == 2 else grad).to(dtype)
        built.step()
    for layer in module:
        if hasattr(layer, "wide"):
            assert torch.equal(layer.wide[..., 1], torch.full_like(layer.wide[..., 1], 7.0))
    return [param.detach().clone() for param in module.parameters()]


AWARE = {"bf16": True, "use_precision_aware_optimizer": True}
KINDS = {
    "fp32": (torch.float32, {}),
    "fp32, clipped": (torch.float32, {"clip_grad": 0.01}),
    "bf16": (torch.bfloat16, {"bf16": True}),
    "bf16, remainders": (torch.bfloat16, AWARE),
    "bf16 moments": (torch.bfloat16, {**AWARE, "exp_avg_dtype": "bfloat16"}),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("optimizer", ["adamw", "adam", "sgd"])
def test_the_order_of_memory_changes_no_bit_of_a_step(optimizer, kind):
    """Before and after the build; in a wider tensor nothing between is touched; clipped norms add in another order."""
    dtype, settings = KINDS[kind]
    if optimizer == "sgd":
        settings = {key: value for key, value in settings.items() if key != "exp_avg_dtype"} | {
            "sgd_momentum": 0.9
        }
    expected = trained(optimizer, dtype, settings, nothing, 0)
    for change in (channels_last, transposed, with_holes):
        for when in (0, 3):
            found = trained(optimizer, dtype, settings, change, when)
            for one, other in zip(expected, found, strict=True):
                torch.testing.assert_close(
                    other, one, rtol=1e-5 if dtype == torch.float32 else 1e-2, atol=1e-7
                )
    swapped = trained(optimizer, dtype, settings, nothing, 0, swapped=True)
    for one, other in zip(expected, swapped, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-5 if dtype == torch.float32 else 1e-2, atol=1e-7)


def test_states_keep_their_names_and_values():
    """A state dict after a conversion is that of a model that was never converted."""
    states = []
    for change in (nothing, channels_last):
        module = model(torch.float32)
        built = build_optimizer(module, "adam", lr=0.01)
        for step in range(2):
            for param in module.parameters():
                param.grad = torch.ones_like(param)
            built.step()
            if not step:
                change(module)
        states.append(built.state_dict()["state"])
    one, other = states
    for index, state in one.items():
        for key, value in state.items():
            torch.testing.assert_close(other[index][key], value)


def test_a_gradient_with_the_same_holes() -> None:
    """A slice of a wider weight whose gradient is a slice of a wider gradient."""
    ends = []
    for holes in (False, True):
        module = model(torch.float32)
        if holes:
            with_holes(module)
        built = build_optimizer(module, "adam", lr=0.01)
        for step in range(3):
            torch.manual_seed(step)
            for param in module.parameters():
                grad = torch.randn(param.shape)
                param.grad = torch.stack([grad, grad], -1)[..., 0] if holes else grad
            built.step()
        ends.append([param.detach().clone() for param in module.parameters()])
    for one, other in zip(*ends, strict=True):
        torch.testing.assert_close(other, one)
