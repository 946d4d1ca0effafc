"""Ctrl-C, noted until the step that goes on has ended."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Self

__all__ = ["Interrupts"]


class Interrupts:
    """Notes the first Ctrl-C; a second one interrupts at once, as ever.

    Used in a `with` statement. A process that ignores Ctrl-C, as a shell's background job does, goes on ignoring it.

    Attributes:
        pressed: whether Ctrl-C was pressed.
    """

    def __init__(self) -> None:
        self.pressed = False
        self._noting = False

    def __enter__(self) -> Self:
        in_main_thread = threading.current_thread() is threading.main_thread()
        if in_main_thread and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, self._note)
            self._noting = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._noting:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.pressed:
            signal.default_int_handler(number, frame)
        self.pressed = True
