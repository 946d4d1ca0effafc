"""Saving while training goes on."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch.distributed as dist
from attrs import frozen

from megaopt_core.state import Ranks

__all__ = ["PendingSave", "background_group", "in_thread"]

_GROUPS: dict[int, tuple[Any, Any]] = {}


@frozen(eq=False)
class PendingSave:
    """A checkpoint that is being written in the background.

    Args:
        path: where it will be.
    """

    path: Path
    _future: Future[None]

    @classmethod
    def of(
        cls,
        path: Path,
        writing: Future[Any],
        end: Callable[[], None],
        failed: Callable[[BaseException], BaseException],
    ) -> PendingSave:
        """Return a handle on writing that is under way.

        Args:
            path: where the checkpoint will be.
            writing: done when everything is written.
            end: cleans up, before anybody hears of the result.
            failed: turns whatever went wrong into what is raised.
        """
        result: Future[None] = Future()

        def done(finished: Future[Any]) -> None:
            end()
            error = finished.exception()
            if error is None:
                result.set_result(None)
            else:
                result.set_exception(failed(error))

        writing.add_done_callback(done)
        return cls(path, result)

    def done(self) -> bool:
        """Return whether the save is over, one way or the other."""
        return self._future.done()

    def result(self, timeout: float | None = None) -> None:
        """Wait until the checkpoint is complete.

        Args:
            timeout: seconds; None: as long as it takes.

        Raises:
            CheckpointError: it could not be saved; what was at the path before is still there.
            TimeoutError: it is not complete yet.
        """
        self._future.result(timeout)


def in_thread(action: Callable[[], None]) -> Future[None]:
    """Run a function in a thread of its own; the interpreter waits for it before it ends.

    Args:
        action: what to do.
    """
    pool = ThreadPoolExecutor(1, thread_name_prefix="megaopt-save")
    future = pool.submit(action)
    pool.shutdown(wait=False)
    return future


def background_group(ranks: Ranks) -> Any:
    """Return a group over the same ranks that training does not use, so that messages cannot cross: a collective.

    Args:
        ranks: who saves.
    """
    if ranks.size == 1:
        return None
    group = ranks.group or dist.group.WORLD
    known = _GROUPS.get(id(group))
    if known is None or known[0] is not group:
        members = dist.get_process_group_ranks(group)
        known = group, dist.new_group(members, backend="gloo", use_local_synchronization=True)
        _GROUPS[id(group)] = known
    return known[1]
