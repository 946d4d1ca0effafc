"""Saving while training goes on."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch.distributed as dist
from attrs import frozen

from megaopt_core.errors import CheckpointError
from megaopt_core.parallel import timeout_of
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
    _warn: Callable[[], None]

    @classmethod
    def of(
        cls,
        path: Path,
        writing: Future[Any],
        end: Callable[[], None],
        failed: Callable[[BaseException], BaseException],
        warn: Callable[[], None],
    ) -> PendingSave:
        """Return a handle on writing that is under way.

        Args:
            path: where the checkpoint will be.
            writing: done when everything is written.
            end: cleans up, before anybody hears of the result.
            failed: turns whatever went wrong into what is raised.
            warn: tells whoever waits for the result what did not go well, although the checkpoint is complete.
        """
        result: Future[None] = Future()

        def done(finished: Future[Any]) -> None:
            try:
                end()
            finally:
                tell(finished.exception())

        def tell(error: BaseException | None) -> None:
            if error is None:
                result.set_result(None)
            else:
                result.set_exception(failed(error))

        writing.add_done_callback(done)
        return cls(path, result, warn)

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
        self._warn()


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
    if group is None:
        raise CheckpointError("torch.distributed was shut down")
    known = _GROUPS.get(id(group))
    if known is None or known[0] is not group:
        members = dist.get_process_group_ranks(group)
        try:
            made = dist.new_group(
                members, timeout=timeout_of(group), backend="gloo", use_local_synchronization=True
            )
        except RuntimeError as error:
            raise CheckpointError(f"another rank is gone: {error}") from error
        known = group, made
        _GROUPS[id(group)] = known
    return known[1]
