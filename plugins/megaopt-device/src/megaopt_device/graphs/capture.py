"""What captures and replays work of a device: CUDA's graphs."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import torch
from attrs import define, field

__all__ = ["Capture", "CudaCapture"]


class Capture(Protocol):
    """Captures what an action launches, without executing it."""

    def warm_up(self, action: Callable[[], Any]) -> str | None:
        """Execute an action where it will be captured, so that libraries make their workspaces before.

        Args:
            action: launches work.

        Returns:
            Why it cannot be captured, where that was seen.
        """

    def capture(self, action: Callable[[], Any]) -> Callable[[], None]:
        """Return what repeats the work that an action launches; nothing of it has been executed yet.

        Args:
            action: launches work, and waits for none of it.

        Raises:
            RuntimeError: it waits for the device, or does something else that a graph cannot hold.
        """

    def release(self) -> None:
        """Let go of memory that is kept for further captures; what was captured is not replayed any more."""


@define(eq=False)
class CudaCapture:
    """CUDA graphs, on a stream of their own, that share one pool of memory.

    Args:
        device: a CUDA device.
    """

    device: torch.device
    _newest: torch.cuda.CUDAGraph | None = field(default=None, init=False)

    @cached_property
    def stream(self) -> torch.cuda.Stream:
        """Where actions run before they are captured, and are captured."""
        return torch.cuda.Stream(self.device)

    def warm_up(self, action: Callable[[], Any]) -> str | None:
        """Execute an action on the stream of captures, and watch whether the host waits in it.

        A capture that fails leaves the allocator in a state in which some memory is not given back; so a step that
        waits is found before.

        Args:
            action: launches work.
        """
        current = torch.cuda.current_stream(self.device)
        self.stream.wait_stream(current)
        mode = torch.cuda.get_sync_debug_mode()
        with warnings.catch_warnings(record=True) as caught, torch.cuda.stream(self.stream):
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                action()
            finally:
                torch.cuda.set_sync_debug_mode(mode)
        current.wait_stream(self.stream)
        waits = [each for each in caught if "synchronizing CUDA operation" in str(each.message)]
        for each in caught:
            if each not in waits and "Synchronization debug mode" not in str(each.message):
                warnings.warn_explicit(each.message, each.category, each.filename, each.lineno)
        if not waits:
            return None
        return f"a step waits for the device ({Path(waits[0].filename).name}, line {waits[0].lineno})"

    def capture(self, action: Callable[[], Any]) -> Callable[[], None]:
        """Return the replay of a CUDA graph.

        Args:
            action: launches work.

        Raises:
            RuntimeError: CUDA refuses to capture it.
        """
        graph = torch.cuda.CUDAGraph()
        # A pool is gone with its last graph: the newest one is kept, so that the next may go on with its memory. None
        # needs what another has left there.
        pool = None if self._newest is None else self._newest.pool()
        # Other threads, such as a data loader's, may go on with what a capture must not hold.
        with (
            _nothing_collected(),
            torch.cuda.graph(graph, pool=pool, stream=self.stream, capture_error_mode="thread_local"),
        ):
            action()
        self._newest = graph
        return graph.replay

    def release(self) -> None:
        """Let go of the pool."""
        self._newest = None


@contextmanager
def _nothing_collected() -> Iterator[None]:
    """Keep Python's collector from what is garbage by now: a graph among it would end the capture that is going on."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
