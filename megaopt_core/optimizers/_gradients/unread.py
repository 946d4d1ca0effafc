"""What a step measured and the host has not read: it travels to the host while the device goes on."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from attrs import define, field

from megaopt_core.optimizers._gradients.double_clipping import DoubleClippingWatch
from megaopt_core.optimizers._gradients.to_host import ToHost

if TYPE_CHECKING:
    from megaopt_core.optimizers._between_steps.foreign_writes import ForeignWrites

__all__ = ["UnreadStats"]


@define(eq=False)
class UnreadStats:
    """Norms, zeros and flags of one step; the host waits for them when one is asked for.

    Args:
        keys: norm group of each sum of squares; empty where norms were not asked for.
        values: the sums, then the number of zeros, then a flag for each of `writes`; on the device.
        writes: what notices foreign writes on the device.
        watch: is told of the norm once it is here.
        clip_grad: where the norm was clipped; 0: nowhere.
        counts: zeros were counted.
    """

    keys: Sequence[str | None]
    values: ToHost = field(converter=ToHost)
    writes: Sequence[ForeignWrites]
    watch: DoubleClippingWatch
    clip_grad: float
    counts: bool

    def __attrs_post_init__(self) -> None:
        for each in self.writes:
            each.is_told = False  # the step goes on without the answer

    @property
    def norms(self) -> Mapping[str | None, float]:
        """Norm group to L2 norm; the host waits until it is measured, not until the step is made."""
        return {key: math.sqrt(square) for key, square in zip(self.keys, self.values.numbers, strict=False)}

    def norm(self, otherwise: float | None) -> float | None:
        """Return the main norm.

        Args:
            otherwise: what is returned where norms were not asked for.
        """
        return self.norms[None] if self.keys else otherwise

    def zeros(self, otherwise: int | None) -> int | None:
        """Return how many elements were zero.

        Args:
            otherwise: what is returned where they were not counted.
        """
        return int(self.values.numbers[len(self.keys)]) if self.counts else otherwise

    def settle(self) -> None:
        """Look at what nobody asked for; a step later, when it is on the host already."""
        if not (self.keys or self.writes):
            return
        flags = self.values.numbers[len(self.keys) + 1 :]
        if self.keys and self.clip_grad > 0.0:
            self.watch.observe(self.norms[None], self.clip_grad)
        if any(flag > 0 for flag in flags):
            warnings.warn(
                "somebody wrote to the model before the last step by means that no version counter sees (`param.data`, "
                "a kernel), and the step went on from main values: nothing is read from the device before a step here. "
                "Call optimizer.reload_model_params() after such a write",
                UserWarning,
                stacklevel=2,
            )
