"""Steps and saves of one optimizer, one at a time: a save in the middle of a step would hold parts of two steps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import RLock

from attrs import define, field

from megaopt_core.errors import CheckpointError

__all__ = ["StepLock"]


@define(eq=False)
class StepLock:
    """Held while a step changes something, as `with lock:`, and while a save reads, as `with lock.saving():`."""

    _lock: RLock = field(factory=RLock, init=False)
    _depth: int = field(default=0, init=False)

    def __enter__(self) -> None:
        self._lock.acquire()
        self._depth += 1

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        self._lock.release()

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Keep steps of other threads waiting; wait for one that is under way.

        Raises:
            CheckpointError: this thread is in a step, as a signal handler may be.
        """
        with self._lock:
            if self._depth:
                raise CheckpointError(
                    "a save cannot begin inside a step, because some parameters have their new values and "
                    "others do not: let a signal handler set a flag, and save after optimizer.step()"
                )
            yield
