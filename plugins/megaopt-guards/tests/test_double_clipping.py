"""A trainer that clips before the optimizer does leaves norms that tell it."""

import warnings

import pytest
import torch
from megaopt_guards import DoubleClipping
from torch import nn

pytestmark = pytest.mark.any_python


def _warnings_of(norms: list[float]) -> list[int]:
    """Return the steps, counted from 1, in which a watch warns."""
    watch, warned = DoubleClipping(), []
    for step, norm in enumerate(norms, 1):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            watch.observe(norm, 1.0)
        warned += [step] * len(caught)
    return warned


def _clipped_norms(limit: float, dtype: torch.dtype, steps: int) -> list[float]:
    weight = nn.Parameter(torch.zeros(200, 200, dtype=dtype))
    norms = []
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        weight.grad = torch.randn(200, 200, generator=generator).to(dtype) * (1 + step % 3)
        nn.utils.clip_grad_norm_([weight], limit)
        norms.append(weight.grad.double().norm().item())
    return norms


@pytest.mark.parametrize("limit", [1.0, 1.25, 0.333])
@pytest.mark.parametrize(("dtype", "after"), [(torch.float32, 5), (torch.float16, 16), (torch.bfloat16, 16)])
def test_clipping_is_noticed_at_any_limit_and_in_any_dtype(limit, dtype, after) -> None:
    """Once; rounding in bf16 takes longer to tell from chance."""
    warned = _warnings_of(_clipped_norms(limit, dtype, 20))
    assert len(warned) == 1
    assert warned[0] <= after


@pytest.mark.parametrize(
    "norms",
    [
        [0.5] * 20,
        [0.5 * 0.99999**step for step in range(30)],
        [0.5 + 1e-7 * step for step in range(30)],
        [0.0] * 20,
        [float("nan")] * 20,
        [float("inf")] * 20,
        [0.5, 0.5001, 0.4, 0.5, 0.5001, 0.4] * 5,
        [1.0, 1.0, 1.0, 1.0, 1.0001] * 6,
    ],
    ids=["constant", "falling", "rising", "zero", "nan", "inf", "wandering", "repeating"],
)
def test_norms_that_nobody_clipped_are_not_taken_for_it(norms) -> None:
    """Repeated batches, a run that converges, and gradients that differ."""
    assert _warnings_of(norms) == []
