"""The page about learning rates: its formulas make one step equally large in every scale mode."""

from __future__ import annotations

import math

import pytest
import torch
from megaopt_muon import TensorParallelMuon

pytestmark = pytest.mark.any_python

ADAMW = 0.01
SHAPES = [(32, 32), (32, 96), (96, 32)]
"""Rows and columns: square, wide, tall."""


def moved(rows: int, columns: int, lr: float, mode: str, factor: float = 1.0) -> float:
    """How far one step moves a matrix, as the root mean square of its elements."""
    chance = torch.Generator().manual_seed(rows + 2 * columns)
    weight = torch.nn.Parameter(torch.zeros(rows, columns))
    weight.grad = torch.randn(rows, columns, generator=chance)
    optimizer = TensorParallelMuon(
        [weight],
        lr=lr,
        weight_decay=0.0,
        momentum=0.0,
        scale_mode=mode,
        extra_scale_factor=factor,
        fp32_matmul_prec="highest",
    )
    optimizer.step()
    return float(weight.detach().square().mean().sqrt())


def rates(rows: int, columns: int) -> dict[str, float]:
    """The page's learning rate for each scale mode, from AdamW's."""
    narrow = 0.2 * ADAMW * math.sqrt(columns)
    return {
        "spectral": 0.2 * ADAMW,
        "shape_scaling": narrow,
        "unit_rms_norm": narrow if rows >= columns else 0.2 * ADAMW * columns / math.sqrt(rows),
    }


@pytest.mark.parametrize(("rows", "columns"), SHAPES)
@pytest.mark.parametrize("mode", ["spectral", "shape_scaling", "unit_rms_norm"])
def test_a_learning_rate_of_the_page_steps_as_far_as_with_the_factor(rows, columns, mode) -> None:
    """Whatever the shape."""
    expected = moved(rows, columns, ADAMW, "spectral", 0.2)
    assert moved(rows, columns, rates(rows, columns)[mode], mode) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_the_authors_learning_rate_is_converted(rows, columns) -> None:
    """0.02 with his scale is 0.1 over the root of the columns with the factor."""
    his = moved(rows, columns, 0.02, "shape_scaling")
    assert moved(rows, columns, 0.1 / math.sqrt(columns), "spectral", 0.2) == pytest.approx(his, rel=1e-5)


def test_a_step_is_of_the_size_that_the_page_says() -> None:
    """0.2 of the learning rate, within what five steps of the iteration leave of the singular values."""
    assert moved(96, 96, ADAMW, "spectral", 0.2) == pytest.approx(0.2 * ADAMW, rel=0.2)
