"""What captures and replays work of a device: CUDA's graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from attrs import define, field

__all__ = ["Capture", "CudaCapture"]


class Capture(Protocol):
    """Captures what an action launches, without executing it."""

    def warm_up(self, action: Callable[[], Any]) -> None:
        """Execute an action where it will be captured, so that libraries make their workspaces before.

        Args:
            action: launches work.
        """

    def capture(self, action: Callable[[], Any]) -> Callable[[], None]:
        """Return what repeats the work that an action launches; nothing of it has been executed yet.

        Args:
            action: launches work, and waits for none of it.

        Raises:
            RuntimeError: it waits for the device, or does something else that a graph cannot hold.
        """


@define(eq=False)
class CudaCapture:
    """CUDA graphs, on a stream of their own, that share one pool of memory.

    Args:
        device: a CUDA device.
    """

    device: torch.device
    _stream: torch.cuda.Stream | None = field(default=None, init=False)
    _pool: Any = field(default=None, init=False)

    @property
    def stream(self) -> torch.cuda.Stream:
        """Where actions run before they are captured, and are captured."""
        if self._stream is None:
            self._stream = torch.cuda.Stream(self.device)
        return self._stream

    def warm_up(self, action: Callable[[], Any]) -> None:
        """Execute an action on the stream of captures.

        Args:
            action: launches work.
        """
        current = torch.cuda.current_stream(self.device)
        self.stream.wait_stream(current)
        with torch.cuda.stream(self.stream):
            action()
        current.wait_stream(self.stream)

    def capture(self, action: Callable[[], Any]) -> Callable[[], None]:
        """Return the replay of a CUDA graph.

        Args:
            action: launches work.

        Raises:
            RuntimeError: CUDA refuses to capture it.
        """
        graph = torch.cuda.CUDAGraph()
        # Other threads, such as a data loader's, may go on with what a capture must not hold.
        with torch.cuda.graph(graph, pool=self._pool, stream=self.stream, capture_error_mode="thread_local"):
            action()
        self._pool = self._pool or graph.pool()
        return graph.replay
