"""Ranks that agree: all go on, or all raise the same error."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import torch.distributed as dist
from attrs import frozen

from megaopt_core.errors import CheckpointError
from megaopt_core.parallel import is_distributed

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["ALONE", "Ranks"]


@frozen(eq=False)
class Ranks:
    """The processes that save or load a checkpoint together.

    Args:
        group: their process group; None: the default one, or this process alone where there is none.
        alone: this process alone, whatever groups there are.
    """

    group: ProcessGroup | None = None
    alone: bool = False

    @property
    def size(self) -> int:
        """Number of processes."""
        return dist.get_world_size(self.group) if is_distributed() and not self.alone else 1

    @property
    def rank(self) -> int:
        """This process's number among them."""
        return dist.get_rank(self.group) if is_distributed() and not self.alone else 0

    def gather[T](self, value: T) -> list[T]:
        """Return every rank's value, in the order of ranks, on every rank.

        Args:
            value: this rank's; small.
        """
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        try:
            dist.all_gather_object(values, value, group=self.group)
        except RuntimeError as error:
            raise CheckpointError(f"another rank is gone: {error}") from error
        return cast("list[T]", values)

    def gather_different[T](self, value: T) -> list[T]:
        """Return the ranks' values without repetitions; ranks that have the same value send it once.

        Args:
            value: this rank's, as JSON has it.
        """
        digest = hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
        digests = self.gather(digest)
        mine = digests.index(digest) == self.rank
        sent = self.gather(value if mine else None)
        return [cast("T", sent[digests.index(one)]) for one in dict.fromkeys(digests)]

    def agree[T](self, action: Callable[[], T]) -> T:
        """Do something on every rank, and raise on all of them if it fails on one.

        Args:
            action: what to do; it must not communicate.

        Raises:
            CheckpointError: what the first rank that failed raised.
        """
        result, failure = None, None
        try:
            result = action()
        except Exception as error:  # noqa: BLE001 - the other ranks wait to hear of it
            failure = error
        self.raise_together(failure)
        return cast("T", result)

    def raise_together(self, failure: Exception | None) -> None:
        """Raise on every rank if some rank failed.

        Args:
            failure: this rank's error.

        Raises:
            CheckpointError: this rank's own error, or the first other rank's.
        """
        failures = self.gather(None if failure is None else _portable(failure))
        if failure is not None:
            raise failure
        for rank, other in enumerate(failures):
            if other is not None:
                other.add_note(f"on rank {rank}")
                raise other

    def first[T](self, action: Callable[[], T]) -> T:
        """Do something on the first rank, and return its result, or raise its error, on every rank.

        Args:
            action: what to do; its result is sent to the others.
        """
        result = self.agree(lambda: action() if self.rank == 0 else None)
        return cast("T", self.gather(result)[0])


ALONE = Ranks(alone=True)
"""This process, which agrees with itself."""


def _portable(error: Exception) -> CheckpointError:
    """Return an error that can be sent: a checkpoint's as it is, others by their words."""
    return (
        error if isinstance(error, CheckpointError) else CheckpointError(f"{type(error).__name__}: {error}")
    )
