"""One all-to-all for tensors of any number and dtypes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from attrs import frozen

from megaopt_core import ProcessGroupCollection
from megaopt_core.errors import ParallelGroupError
from megaopt_core.parallel import needs_all_ranks, rank_in, size_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["FusedExchange", "Travelling"]

_ALIGNMENT = 16
"""Bytes that each tensor of a message begins at a multiple of, which all dtypes can be read at."""


@frozen(eq=False)
class FusedExchange:
    """Every rank of a group sends some tensors to every rank, in one collective.

    Args:
        axis: name of the axis, for errors.
        group: its ranks.
    """

    axis: str
    group: ProcessGroup

    @classmethod
    def along(cls, axis: str, pgs: ProcessGroupCollection) -> FusedExchange:
        """Return the exchange of the ranks along an axis.

        Args:
            axis: its name.
            pgs: the process groups.

        Raises:
            ParallelGroupError: it has no process group.
        """
        group = pgs.of_axis(axis)
        if group is None:
            raise ParallelGroupError(
                f"matrices are cut along {axis!r}, which has no process group: give it in pg_collection"
            )
        return cls(axis, group)

    @property
    def size(self) -> int:
        """Number of ranks."""
        return size_of(self.group)

    @property
    def rank(self) -> int:
        """This process's place."""
        return rank_in(self.group)

    def run(
        self,
        leaving: Sequence[Sequence[torch.Tensor]],
        expected: Sequence[Sequence[tuple[int, torch.dtype]]],
        what: str,
    ) -> list[list[torch.Tensor]]:
        """Return what has arrived from each rank.

        Args:
            leaving: for each rank, the tensors that it is sent.
            expected: for each rank, number of elements and dtype of each tensor that it sends here.
            what: says in errors what travels.

        Raises:
            CommunicationError: another rank has stopped, or the process group's timeout is over.
        """
        device = next((tensor.device for some in leaving for tensor in some), torch.device("cpu"))
        return self.start(leaving, expected, what, device).wait()

    def start(
        self,
        leaving: Sequence[Sequence[torch.Tensor]],
        expected: Sequence[Sequence[tuple[int, torch.dtype]]],
        what: str,
        device: torch.device,
    ) -> Travelling:
        """Begin to send and receive, as :meth:`run` does; what is sent is copied, and may change from now on.

        Args:
            leaving: for each rank, the tensors that it is sent.
            expected: for each rank, number of elements and dtype of each tensor that it sends here.
            what: says in errors what travels.
            device: where messages lie.

        Raises:
            CommunicationError: another rank has stopped, or the process group's timeout is over.
        """
        sent = [sum(_padded(tensor.nbytes) for tensor in some) for some in leaving]
        due = [sum(_padded(numel * dtype.itemsize) for numel, dtype in some) for some in expected]
        message = torch.empty(sum(sent), dtype=torch.uint8, device=device)
        position = 0
        for tensor in (tensor for some in leaving for tensor in some):
            into = message[position : position + tensor.nbytes].view(tensor.dtype)
            into.view(tensor.shape).copy_(tensor)
            position += _padded(tensor.nbytes)
        received = torch.empty(sum(due), dtype=torch.uint8, device=device)
        told = f"exchange of {what} over {self.size} ranks of {self.axis!r}"
        with needs_all_ranks(told):
            work = dist.all_to_all_single(received, message, due, sent, group=self.group, async_op=True)
        return Travelling(work, message, received, expected, told)


@frozen(eq=False)
class Travelling:
    """Tensors on their way.

    Args:
        work: of the process group; None: everything is there.
        message: what is sent, which lives until it has left.
        received: what arrives.
        expected: for each rank, number of elements and dtype of each tensor in `received`.
        told: says in errors what travels.
    """

    work: dist.Work | None
    message: torch.Tensor
    received: torch.Tensor
    expected: Sequence[Sequence[tuple[int, torch.dtype]]]
    told: str

    def wait(self) -> list[list[torch.Tensor]]:
        """Return what has arrived from each rank, when all of it has.

        Raises:
            CommunicationError: another rank has stopped, or the process group's timeout is over.
        """
        if self.work is not None:
            with needs_all_ranks(self.told):
                self.work.wait()
        return _cut(self.received, self.expected)


def _cut(
    received: torch.Tensor, expected: Sequence[Sequence[tuple[int, torch.dtype]]]
) -> list[list[torch.Tensor]]:
    """Return the tensors of a message, as views."""
    position, arrived = 0, []
    for some in expected:
        tensors = []
        for numel, dtype in some:
            nbytes = numel * dtype.itemsize
            tensors.append(received[position : position + nbytes].view(dtype))
            position += _padded(nbytes)
        arrived.append(tensors)
    return arrived


def _padded(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT
