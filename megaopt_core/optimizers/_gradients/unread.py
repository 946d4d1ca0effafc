"""What a device has computed and the host has not read: it travels to the host while the device goes on."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from attrs import define, field

from megaopt_core.errors import warn_user
from megaopt_core.optimizers._gradients.double_clipping import DoubleClippingWatch

if TYPE_CHECKING:
    from megaopt_core.optimizers._between_steps.writes import ForeignWrites

__all__ = ["ToHost", "UnreadStats"]


class ToHost:
    """Numbers that are being copied to the host while the device goes on; what no CUDA device holds stays where it is.

    Args:
        values: the numbers, as one tensor.
    """

    def __init__(self, values: torch.Tensor) -> None:
        self._host = values
        self._arrived: torch.cuda.Event | None = None
        if values.is_cuda:
            self._host = torch.empty_like(values, device="cpu", pin_memory=True)
            self._host.copy_(values, non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record(torch.cuda.current_stream(values.device))

    @cached_property
    def numbers(self) -> list[Any]:
        """The numbers; the host waits until they are there."""
        if self._arrived is not None:
            self._arrived.synchronize()
        numbers: list[Any] = self._host.tolist()
        return numbers


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
            warn_user(
                "somebody wrote to the model before the last step by means that no version counter sees (`param.data`, "
                "a kernel), and the step went on from main values: nothing is read from the device before a step here. "
                "Call optimizer.reload_model_params() after such a write",
                UserWarning,
            )
