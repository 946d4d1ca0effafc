"""States that are stored in less lie, while they are stepped, as their parameters do: fused kernels ask no strides."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from megaopt_core.optimizers import MegatronOptimizer
from megaopt_core.precision import StoredSlice

pytestmark = pytest.mark.any_python

AWARE = {"use_precision_aware_optimizer": True}
DTYPES = ["float32", "bf16", "fp16", "fp8", "uint8"]
POLICIES: list[tuple[torch.dtype, dict[str, Any]]] = [
    (torch.float32, {}),
    (torch.bfloat16, {"bf16": True}),
    (torch.bfloat16, {"bf16": True, "store_param_remainders": False}),
    (torch.float16, {"fp16": True, "initial_loss_scale": 1.0}),
]


def plain(values: torch.Tensor) -> torch.Tensor:
    """In the usual order."""
    return values


def channels_last(values: torch.Tensor) -> torch.Tensor:
    """As convolutions have it."""
    return values.contiguous(memory_format=torch.channels_last)


def transposed(values: torch.Tensor) -> torch.Tensor:
    """The first dimension beside itself in memory."""
    return values.transpose(0, 1).contiguous().transpose(0, 1)


def with_holes(values: torch.Tensor) -> torch.Tensor:
    """Every other number in memory."""
    return torch.stack([values, values], dim=-1)[..., 0]


ORDERS = [channels_last, transposed, with_holes]


def built(
    build: Callable[..., MegatronOptimizer],
    order: Callable[[torch.Tensor], torch.Tensor],
    dtype: torch.dtype,
    **settings: Any,
) -> tuple[nn.Module, MegatronOptimizer]:
    """A module with one weight in some order, and its optimizer, by a fused kernel."""
    model = nn.Module()
    values = torch.randn(16, 8, 4, 4, generator=torch.Generator().manual_seed(0)).to(dtype)
    model.weight = nn.Parameter(order(values))
    return model, build(model, "t_fused", **AWARE, **settings)


def train(model: nn.Module, optimizer: MegatronOptimizer, steps: range) -> None:
    """Some steps, each with gradients of its own."""
    for step in steps:
        grad = torch.randn(16, 8, 4, 4, generator=torch.Generator().manual_seed(100 + step))
        model.weight.grad = grad.to(model.weight.dtype)
        optimizer.step()


def found(model: nn.Module, optimizer: MegatronOptimizer) -> dict[str, torch.Tensor]:
    """Weight and states."""
    return {"": model.weight.detach().clone(), **optimizer.state[model.weight]}


def require_same_bits(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    """Raise unless every value is the same."""
    assert [key for key in one if not torch.equal(one[key], other[key])] == []


@pytest.mark.filterwarnings("ignore::megaopt_core.errors.UnusedSettingWarning")
@pytest.mark.parametrize("state", DTYPES)
@pytest.mark.parametrize(("dtype", "settings"), POLICIES)
@pytest.mark.parametrize("order", ORDERS)
def test_the_order_in_memory_changes_no_bit(build, order, dtype, settings, state) -> None:
    """After a few steps weight and states are those of a weight in the usual order."""
    pairs = [
        built(build, each, dtype, exp_avg_dtype=state, exp_avg_sq_dtype=state, **settings)
        for each in (plain, order)
    ]
    for model, optimizer in pairs:
        train(model, optimizer, range(4))
    require_same_bits(*(found(*pair) for pair in pairs))


@pytest.mark.parametrize("state", ["fp16", "fp8", "uint8"])
@pytest.mark.parametrize("order", ORDERS)
def test_restored_states_are_those_of_their_elements(build, order, state) -> None:
    """Stored elements that are taken back between two steps, as by a load, are stepped where they belong."""
    pairs = [
        built(build, each, torch.float32, exp_avg_dtype=state, exp_avg_sq_dtype=state)
        for each in (plain, order)
    ]
    for model, optimizer in pairs:
        train(model, optimizer, range(2))
        (part,) = optimizer.parts
        inner = part.inner.state[part.stepped[0]]
        saved = {key: part.precision.coded_state(0, key, inner) for key in ("exp_avg", "exp_avg_sq")}
        kept = {key: coded.elements(0, 2048).clone() for key, coded in saved.items()}
        values = {key: coded.values(0, 2048) for key, coded in saved.items()}
        train(model, optimizer, range(2, 4))
        for key, coded in saved.items():
            slices = [StoredSlice(0, kept[key], coded.code, values[key], 0, 2048)]
            part.precision.restore_state(0, key, inner, slices)
        train(model, optimizer, range(4, 6))
    require_same_bits(*(found(*pair) for pair in pairs))
