"""What a communicator offers: collectives in place on one flat tensor, that return at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from attrs import define

from megaopt_core.parallel import needs_all_ranks

__all__ = ["DONE", "Communicator", "Pending", "shard_of"]


def shard_of(bucket: torch.Tensor, rank: int, size: int, ends: Sequence[int] = ()) -> torch.Tensor:
    """Return a rank's part of a flat tensor, as a view.

    Args:
        bucket: a flat tensor, whose size is a multiple of `size` where its parts are equal.
        rank: whose part.
        size: number of parts.
        ends: where each rank's part ends; empty: equal parts.
    """
    if ends:
        return bucket[ends[rank - 1] if rank else 0 : ends[rank]]
    numel = bucket.numel() // size
    return bucket[rank * numel : (rank + 1) * numel]


@define(eq=False)
class Pending:
    """A collective that is under way.

    Args:
        what: what it does, for errors.
        works: what torch is doing.
        then: what is left to do, before or while the works are waited for.
        done: what is to be done at the very end.
    """

    what: str
    works: Sequence[Any] = ()
    then: Callable[[], None] | None = None
    done: Callable[[], None] | None = None

    def wait(self) -> None:
        """Return when the result may be used; a second call does nothing.

        Raises:
            CommunicationError: another rank has stopped, or the process group's timeout is over.
        """
        works, then, done = self.works, self.then, self.done
        self.works, self.then, self.done = (), None, None
        with needs_all_ranks(self.what):
            if then is not None:
                then()
            for work in works:
                work.wait()
        if done is not None:
            done()


DONE = Pending("nothing")
"""Stands for what needs no communication."""


class Communicator(Protocol):
    """Collectives over one group, in place on flat tensors."""

    @property
    def size(self) -> int:
        """Number of ranks."""

    @property
    def rank(self) -> int:
        """This process's rank."""

    def reduce_scatter(
        self, bucket: torch.Tensor, ends: Sequence[int] = (), *, average: bool = False
    ) -> Pending:
        """Add all ranks' tensors up; each rank gets its shard of the sum, the rest of its tensor is undefined.

        Args:
            bucket: a flat tensor.
            ends: where each rank's shard ends; empty: they are equal, and the size is a multiple of the ranks' number.
            average: divide the sum by the number of ranks.
        """

    def all_gather(self, bucket: torch.Tensor, ends: Sequence[int] = ()) -> Pending:
        """Bring every rank's shard to all ranks.

        Args:
            bucket: a flat tensor of which this rank's shard holds what the others need.
            ends: where each rank's shard ends; empty: they are equal.
        """

    def all_reduce(self, bucket: torch.Tensor, *, average: bool = False) -> Pending:
        """Add all ranks' tensors up on every rank.

        Args:
            bucket: a flat tensor of any size.
            average: divide the sum by the number of ranks.
        """
