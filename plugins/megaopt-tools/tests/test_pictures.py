"""The numbers behind the pictures."""

from __future__ import annotations

import pytest
from megaopt_tools.pictures import smooth


def test_smoothing_is_the_weighted_mean_written_out() -> None:
    """Weights fall by 0.9 a step into the past, and add up to one from the first step on."""
    values = [3.0, 1.0, 4.0, 1.0, 5.0]
    expected = []
    for end in range(1, 6):
        weights = [0.9 ** (end - 1 - i) for i in range(end)]
        expected.append(sum(w * v for w, v in zip(weights, values[:end], strict=True)) / sum(weights))
    assert smooth(values, window=10) == pytest.approx(expected)
    assert smooth(values, window=1) == values
