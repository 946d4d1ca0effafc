"""Noticing that gradients were clipped before they came here."""

from __future__ import annotations

from collections import deque
from itertools import pairwise

from attrs import define, field

from megaopt_core.errors import warn_user

__all__ = ["DoubleClippingWatch"]

_WINDOWS = ((5, 1.0e-4), (16, 2.0**-6))
"""Steps, and how far apart their norms may be: torch rounds the factor to the gradients' dtype."""


@define
class DoubleClippingWatch:
    """Warns once when something else clips the gradients too, such as a trainer's `clip_grad_norm_`.

    Who clips leaves norms that are the same but for rounding: one goes up, another down. Norms that repeat to the bit,
    or that move in one direction as training converges, are no sign of it. Gradients that are normalised look the same.
    """

    _norms: deque[float] = field(factory=lambda: deque(maxlen=_WINDOWS[-1][0]), init=False)
    _warned: bool = field(default=False, init=False)

    def observe(self, norm: float, clip_grad: float) -> None:
        """Take note of a step's norm.

        Args:
            norm: the norm before our own clipping.
            clip_grad: where we clip, for the message.
        """
        if self._warned:
            return
        self._norms.append(norm)
        for steps, tolerance in _WINDOWS:
            latest = list(self._norms)[-steps:]
            if len(latest) == steps and _are_rounded(latest, tolerance):
                self._warned = True
                warn_user(
                    f"the gradient norm was {norm:.3g} in {steps} steps in a row: something clips or normalises "
                    f"gradients before optimizer.step(), which clips them too (clip_grad={clip_grad:g}). Keep one of "
                    "the two: set clip_grad=0.0, or switch the trainer's clipping off",
                    UserWarning,
                )
                return


def _are_rounded(norms: list[float], tolerance: float) -> bool:
    """Return whether norms are one number, missed by a little in both directions, and seldom by the same."""
    least, most = min(norms), max(norms)
    if not 0.0 < most - least <= tolerance * most:
        return False
    changes = [later - earlier for earlier, later in pairwise(norms)]
    rises, falls = sum(change > 0.0 for change in changes), sum(change < 0.0 for change in changes)
    return min(rises, falls) > 0 and 2 * (rises + falls) > len(changes)
