"""The scheduler's part of a load."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from attrs import frozen

from megaopt_core.errors import CheckpointMismatchError
from megaopt_core.state import Source, named_errors, read_values

__all__ = ["SchedulerRestore"]


@frozen
class SchedulerRestore:
    """What a load writes into a scheduler.

    Args:
        source: what is loaded.
        scheduler: the scheduler.
        state: what it gets.
    """

    source: Source
    scheduler: Any
    state: Any

    @classmethod
    def plan(cls, source: Source, scheduler: Any) -> SchedulerRestore:
        """Read what a scheduler will get.

        Args:
            source: what is loaded.
            scheduler: the scheduler.

        Raises:
            CheckpointMismatchError: none was saved.
        """
        if source.manifest.scheduler is None:
            raise CheckpointMismatchError(
                f"{source.name} was saved without a scheduler; load it with scheduler=None", path=source.name
            )
        return cls(source, scheduler, read_values(source, source.manifest.scheduler))

    def write_settings(self, undo: list[Callable[[], None]]) -> None:
        """Give the scheduler its state.

        Args:
            undo: receives what takes it back.
        """
        before = dict(vars(self.scheduler))
        undo.append(lambda: vars(self.scheduler).update(before))
        with named_errors(self.source, "the scheduler does not take its state"):
            self.scheduler.load_state_dict(self.state)

    def write(self) -> None:
        """Write nothing more: a scheduler has no tensors of its own."""
