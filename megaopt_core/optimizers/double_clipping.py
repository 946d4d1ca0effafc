"""Noticing that gradients were clipped before they came here."""

from __future__ import annotations

import warnings

from attrs import define, field

__all__ = ["DoubleClippingWatch"]

_STEPS = 3
_TOLERANCE = 1.0e-4


@define
class DoubleClippingWatch:
    """Warns once when something else clips the gradients too, such as a trainer's `clip_grad_norm_`.

    Who clips at `c` leaves norms that repeat: a round number, missed by a little that differs from step to step. Three
    such norms in a row are no accident.
    """

    _expected: float | None = field(default=None, init=False)
    _last: float = field(default=0.0, init=False)
    _seen: int = field(default=0, init=False)
    _warned: bool = field(default=False, init=False)

    def observe(self, norm: float, clip_grad: float) -> None:
        """Take note of a step's norm.

        Args:
            norm: the norm before our own clipping.
            clip_grad: where we clip, for the message.
        """
        if self._warned:
            return
        rounded = float(f"{norm:.2g}")
        is_near = rounded > 0.0 and 0.0 < abs(norm - rounded) <= _TOLERANCE * rounded
        continues = is_near and rounded == self._expected and norm != self._last
        self._seen = self._seen + 1 if continues else int(is_near)
        self._expected, self._last = (rounded if is_near else None), norm
        if self._seen >= _STEPS:
            self._warned = True
            warnings.warn(
                f"the gradient norm was {rounded:g} in {_STEPS} steps in a row: something clips gradients before "
                f"optimizer.step(), which clips them too (clip_grad={clip_grad:g}). Keep one of the two: set "
                "clip_grad=0.0, or switch the trainer's clipping off",
                UserWarning,
                stacklevel=2,
            )
