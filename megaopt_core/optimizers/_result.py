"""What a step returns."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["StepResult"]


class StepResult(NamedTuple):
    """The outcome of one step.

    Args:
        update_successful: False when the step was skipped because a gradient was not finite.
        grad_norm: L2 norm over all parameters before clipping; None where it was not computed.
        num_zeros_in_grad: number of zero elements; None where they were not counted.
    """

    update_successful: bool
    grad_norm: float | None
    num_zeros_in_grad: int | None
