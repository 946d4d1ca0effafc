"""Copies between a device and the CPU: pinned, and on streams of their own where they are to overlap."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from attrs import define, field

__all__ = ["Copies"]


@define(eq=False)
class Copies:
    """Moves tensors between one device and CPU memory; from "cpu" to "cpu" it copies by the same calls.

    On CUDA, copies to and from pinned memory do not hold up the host. With `overlap` they do not hold up the device
    either: those down and those up have a stream each, which waits for what was launched before.

    Args:
        device: where the model is.
        overlap: copy on streams of their own.
    """

    device: torch.device
    overlap: bool = False
    _down: torch.cuda.Stream | None = field(default=None, init=False)
    _up: torch.cuda.Stream | None = field(default=None, init=False)

    def __attrs_post_init__(self) -> None:
        if self.overlap and self.device.type == "cuda":
            self._down, self._up = torch.cuda.Stream(self.device), torch.cuda.Stream(self.device)

    def memory_like(self, tensor: torch.Tensor, *, pinned: bool) -> torch.Tensor:
        """Return CPU memory for a tensor, without its values.

        Args:
            tensor: of any device.
            pinned: pin it, where the device is CUDA.
        """
        pin = pinned and self.device.type == "cuda"
        return torch.empty_like(tensor.detach(), device="cpu", pin_memory=pin)

    def down(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Begin to copy a tensor to the CPU; :meth:`wait_down` tells when it is there.

        Args:
            target: CPU memory.
            source: on the device.
        """
        with self._on(self._down, source):
            target.copy_(source, non_blocking=target.is_pinned())

    def up(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Begin to copy a tensor to the device; :meth:`wait_up` makes later work on the device wait for it.

        Args:
            target: on the device.
            source: CPU memory, which must stay as it is until then.
        """
        with self._on(self._up, target):
            target.copy_(source, non_blocking=source.is_pinned())

    def wait_down(self) -> None:
        """Return when everything that was sent down is on the CPU."""
        if self._down is not None:
            self._down.synchronize()
        elif self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    def wait_up(self) -> None:
        """Let what is launched from now on wait for everything that was sent up."""
        if self._up is not None:
            torch.cuda.current_stream(self.device).wait_stream(self._up)

    @contextmanager
    def _on(self, stream: torch.cuda.Stream | None, on_device: torch.Tensor) -> Iterator[None]:
        if stream is None:
            yield
            return
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            yield
        # The allocator must not give the memory away while the other stream still reads or writes it.
        on_device.record_stream(stream)
