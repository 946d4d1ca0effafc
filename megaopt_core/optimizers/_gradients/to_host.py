"""Numbers that a device has computed and the host reads later, when they have arrived."""

from __future__ import annotations

from typing import Any

import torch
from attrs import define

__all__ = ["ToHost"]


@define(eq=False)
class ToHost:
    """Numbers that are being copied to the host while the device goes on.

    Args:
        host: where they arrive.
        arrived: is over when they have; None: they are there.
    """

    host: torch.Tensor
    arrived: torch.cuda.Event | None

    @classmethod
    def of(cls, values: torch.Tensor) -> ToHost:
        """Begin to copy; what no CUDA device holds stays where it is.

        Args:
            values: the numbers, as one tensor.
        """
        if not values.is_cuda:
            return cls(values, None)
        host = torch.empty_like(values, device="cpu", pin_memory=True)
        host.copy_(values, non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record(torch.cuda.current_stream(values.device))
        return cls(host, arrived)

    def read(self) -> list[Any]:
        """Return them, once they are there."""
        if self.arrived is not None:
            self.arrived.synchronize()
        numbers: list[Any] = self.host.tolist()
        return numbers
