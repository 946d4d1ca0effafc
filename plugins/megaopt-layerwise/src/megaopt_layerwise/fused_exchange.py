"""One all-to-all for tensors of any number and dtypes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from attrs import frozen

from megaopt_core import ProcessGroupCollection
from megaopt_core.errors import ParallelGroupError
from megaopt_core.parallel import rank_in, size_of, stopped

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["FusedExchange"]

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
        sent = [sum(_padded(tensor.nbytes) for tensor in some) for some in leaving]
        due = [sum(_padded(numel * dtype.itemsize) for numel, dtype in some) for some in expected]
        message = torch.empty(sum(sent), dtype=torch.uint8, device=device)
        position = 0
        for tensor in (tensor for some in leaving for tensor in some):
            into = message[position : position + tensor.nbytes].view(tensor.dtype)
            into.view(tensor.shape).copy_(tensor)
            position += _padded(tensor.nbytes)
        received = torch.empty(sum(due), dtype=torch.uint8, device=device)
        try:
            dist.all_to_all_single(received, message, due, sent, group=self.group)
        except RuntimeError as error:
            raise stopped(f"exchange of {what} over {self.size} ranks of {self.axis!r}", error) from error
        return _cut(received, expected)


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
