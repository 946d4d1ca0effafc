"""Numbers that a device has computed and the host reads later, when they have arrived."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch

__all__ = ["ToHost"]


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
