"""What a step of Muon costs: operations, or measured time where a calibration is named."""

from __future__ import annotations

import math
import os

from megaopt_core.params import MATRIX, MatrixView, ParamSpec

__all__ = ["step_cost"]

_STEPS = 5


def step_cost(spec: ParamSpec, view: MatrixView | None) -> float:
    """Return the operations of the plain iteration, added up over the matrices of `m x n`, `m <= n`.

    A step multiplies `X X^T` and `B X`, which is `4 m^2 n`, and `A A`, which is `2 m^3`. Where `MEGAOPT_CALIBRATION`
    names a file with rates of this processor, on every rank, it is the time of the iteration by these rates, in
    operations of the largest matrices that were measured: smaller ones, which take longer for an operation, count more.

    Args:
        spec: the parameter.
        view: how it is seen as matrices.

    Raises:
        ConfigurationError: `MEGAOPT_CALIBRATION` names a file that cannot be read.
    """
    shapes = (MATRIX if view is None else view).matrix_shapes(spec.shape)
    return sum(math.prod(batch) * _cost_of(*sorted((rows, columns))) for *batch, rows, columns in shapes)


def _cost_of(small: int, large: int) -> float:
    if os.environ.get("MEGAOPT_CALIBRATION"):
        # Only a file that is named is the same on all ranks, which must plan alike.
        from megaopt_muon.choice.calibration import nearest, stored_rates

        known = stored_rates()
        if known:
            seconds = nearest(known, small).run_time((1,) * _STEPS, small, large)
            return 2.0 * seconds / max(known, key=lambda rates: rates.size).apply
    return _STEPS * (4.0 * small**2 * large + 2.0 * small**3)
