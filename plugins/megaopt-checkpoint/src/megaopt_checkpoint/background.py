"""Saving while training goes on."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch.distributed as dist
from attrs import define, field, frozen

from megaopt_checkpoint.ranks import Ranks
from megaopt_core.errors import CheckpointError
from megaopt_core.parallel import timeout_of

__all__ = ["Background", "PendingSave", "background_of", "in_thread"]


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


@define(eq=False)
class Background:
    """Where the ranks of a group write while they train: with messages of their own, one save after the other.

    Two saves at a time would take each other's messages, on whichever rank the second overtakes the first.

    Args:
        training: the group that trains.
        group: one over the same ranks that training does not use.
    """

    training: Any
    group: Any
    broken: bool = False
    """A save failed here: a rank that gave up may have left messages of the group, or the group itself, behind."""
    _writer: ThreadPoolExecutor = field(
        factory=lambda: ThreadPoolExecutor(1, thread_name_prefix="megaopt-save"), init=False
    )

    def submit(self, action: Callable[[], None]) -> Future[None]:
        """Run a function after those that were submitted before; the interpreter waits for it before it ends.

        Args:
            action: what to do.
        """
        future = self._writer.submit(action)
        future.add_done_callback(self._note)
        return future

    def _note(self, done: Future[None]) -> None:
        self.broken = self.broken or done.exception() is not None


_BACKGROUNDS: dict[int, Background] = {}


def background_of(ranks: Ranks) -> Background:
    """Return where several ranks write in the background: a collective. After a failure it is a new place on all.

    Args:
        ranks: who saves.

    Raises:
        CheckpointError: another rank is gone.
    """
    training = ranks.group or dist.group.WORLD
    if training is None:
        raise CheckpointError("torch.distributed was shut down")
    known = _BACKGROUNDS.get(id(training))
    fits = known is not None and known.training is training and not known.broken
    if not all(ranks.gather(fits)):
        known = None
    if known is None:
        members = dist.get_process_group_ranks(training)
        try:
            made = dist.new_group(
                members, timeout=timeout_of(training), backend="gloo", use_local_synchronization=True
            )
        except RuntimeError as error:
            raise CheckpointError(f"another rank is gone: {error}") from error
        known = _BACKGROUNDS[id(training)] = Background(training, made)
    return known
