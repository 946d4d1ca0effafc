"""The scheduler's part of a load."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from attrs import frozen

from megaopt_checkpoint.restore.source import Source, read_values
from megaopt_core.errors import CheckpointMismatchError
from megaopt_core.params import shown
from megaopt_core.state import named_errors

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
    def plan(cls, source: Source, scheduler: Any, *, strict: bool) -> SchedulerRestore:
        """Read what a scheduler will get.

        Args:
            source: what is loaded.
            scheduler: the scheduler.
            strict: the state must be one of a scheduler of this kind.

        Raises:
            CheckpointMismatchError: none was saved, or that of another kind.
        """
        if source.manifest.scheduler is None:
            raise CheckpointMismatchError(
                f"{source.name} was saved without a scheduler; load it with scheduler=None", path=source.name
            )
        state = read_values(source, source.manifest.scheduler)
        if strict:
            _require_kind(source, scheduler, state)
            _require_numbers(source, scheduler, state)
        return cls(source, scheduler, state)

    def write_settings(self, undo: list[Callable[[], None]]) -> None:
        """Give the scheduler its state.

        Args:
            undo: receives what takes it back.
        """
        before = dict(vars(self.scheduler))
        undo.append(lambda: vars(self.scheduler).update(before))
        with named_errors(self.source.name, "the scheduler does not take its state"):
            self.scheduler.load_state_dict(self.state)

    def write(self) -> None:
        """Write nothing more: a scheduler has no tensors of its own."""


def _require_kind(source: Source, scheduler: Any, state: Any) -> None:
    """Raise where a state has settings that a scheduler does not have, and lacks some that it has.

    Schedulers of torch take any state, and then have the settings of both. One of the two alone may be another
    version's; what is private may always be.
    """
    here = scheduler.state_dict() if hasattr(scheduler, "state_dict") else None
    if not (isinstance(here, Mapping) and isinstance(state, Mapping)):
        return
    there, ours = ({key for key in map(str, each) if not key.startswith("_")} for each in (state, here))
    if there - ours and ours - there:
        raise CheckpointMismatchError(
            f"{source.name} holds the state of another scheduler than {type(scheduler).__name__}: it has "
            f"{shown(sorted(there - ours))}, and lacks {shown(sorted(ours - there))}. Give the scheduler that was "
            "saved; scheduler=None loads none, and strict=False gives it the state as it is",
            path=source.name,
        )


def _require_numbers(source: Source, scheduler: Any, state: Any) -> None:
    """Raise where something else than a number stands for one that a scheduler of torch's computes with.

    They take anything, and fail when they are stepped.
    """
    if not isinstance(scheduler, torch.optim.lr_scheduler.LRScheduler):
        return
    for way, value in _misfits("", scheduler.state_dict(), state):
        raise CheckpointMismatchError(
            f"{source.name} holds a state of {type(scheduler).__name__} in which {way.lstrip('.')} is {value!r:.60}, "
            "and it is a number here; strict=False gives it the state as it is",
            path=source.name,
        )


def _misfits(way: str, here: Any, there: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(here, Mapping) and isinstance(there, Mapping):
        for key in here.keys() & there.keys():
            yield from _misfits(f"{way}.{key}", here[key], there[key])
    elif isinstance(here, (list, tuple)) and isinstance(there, (list, tuple)):
        for index, pair in enumerate(zip(here, there, strict=False)):
            yield from _misfits(f"{way}.{index}", *pair)
    elif isinstance(here, (int, float)) and not isinstance(there, (int, float, torch.Tensor)):
        yield way, there
