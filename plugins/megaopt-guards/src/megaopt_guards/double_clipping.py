"""Noticing that gradients were clipped before they came here."""

from __future__ import annotations

from collections import deque
from itertools import pairwise

from megaopt_core.errors import warn_user
from megaopt_core.plugin_api import StepNumbers, StepObserver, StepOutcome

__all__ = ["DoubleClipping"]

_WINDOWS = ((5, 1.0e-4), (16, 2.0**-6))
"""Steps, and how far apart their norms may be: torch rounds the factor to the gradients' dtype."""


class DoubleClipping(StepObserver):
    """Warns once when something else clips the gradients too, such as a trainer's `clip_grad_norm_`.

    Clipping leaves norms that are the same but for rounding: one goes up, another down. Norms that repeat to the bit,
    or that move in one direction as training converges, are no sign of it. Gradients that are normalised look the same.
    """

    def __init__(self) -> None:
        self._norms: deque[float] = deque(maxlen=_WINDOWS[-1][0])
        self._warned = False
        self._unread: StepNumbers | None = None

    def before_step(self) -> None:
        """Look at the norm of the last step, which has arrived on the host by now."""
        numbers, self._unread = self._unread, None
        if numbers is not None:
            self._look(numbers)

    def after_step(self, outcome: StepOutcome) -> None:
        """Take note of a step's norm.

        Args:
            outcome: how the step ended.
        """
        if self._warned or outcome.numbers is None or not outcome.numbers.clip_grad:
            return
        if outcome.how is None:
            self._unread = outcome.numbers
        else:
            self._look(outcome.numbers)

    def _look(self, numbers: StepNumbers) -> None:
        if None in numbers.norms:
            self.observe(numbers.norms[None], numbers.clip_grad)

    def observe(self, norm: float, clip_grad: float) -> None:
        """Warn if the norms of the last steps show that something else clips.

        Args:
            norm: the norm of a step before our own clipping.
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
