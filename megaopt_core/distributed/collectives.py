"""The three collectives of data parallelism, in the form that is fastest on each backend.

Every collective works in place on one flat tensor, whose n-th equal part is the shard of the group's n-th rank, and
returns at once. Gloo moves the shards of a reduce-scatter or an all-gather one after the other; here every pair of
ranks exchanges them directly, all at the same time. Other backends use their own collectives.
`benchmarks/collectives.py` compares both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
from attrs import define, field, frozen

from megaopt_core.errors import CommunicationError
from megaopt_core.parallel.groups import rank_in, size_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["DONE", "Communicator", "Native", "Pending", "PointToPoint", "communicator", "shard_of"]


def shard_of(bucket: torch.Tensor, rank: int, size: int) -> torch.Tensor:
    """Return a rank's equal part of a flat tensor, as a view.

    Args:
        bucket: a flat tensor, whose size is a multiple of `size`.
        rank: whose part.
        size: number of parts.
    """
    numel = bucket.numel() // size
    return bucket[rank * numel : (rank + 1) * numel]


@define(eq=False)
class Pending:
    """A collective that is under way.

    Args:
        what: what it does, for errors.
        works: what torch is doing.
        then: what is left to do once all works are done.
    """

    what: str
    works: Sequence[Any] = ()
    then: Callable[[], None] | None = None

    def wait(self) -> None:
        """Return when the result may be used; a second call does nothing.

        Raises:
            CommunicationError: another rank has stopped, or the process group's timeout is over.
        """
        works, then = self.works, self.then
        self.works, self.then = (), None
        try:
            for work in works:
                work.wait()
        except RuntimeError as error:
            raise CommunicationError(
                f"{self.what} failed: another rank has stopped, or the process group's timeout is over "
                f"({str(error).splitlines()[0]}). Restart all ranks from the last checkpoint"
            ) from error
        if then is not None:
            then()


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

    def reduce_scatter(self, bucket: torch.Tensor, *, average: bool = False) -> Pending:
        """Add all ranks' tensors up; each rank gets its shard of the sum, the rest of its tensor is undefined.

        Args:
            bucket: a flat tensor, whose size is a multiple of the number of ranks.
            average: divide the sum by the number of ranks.
        """

    def all_gather(self, bucket: torch.Tensor) -> Pending:
        """Bring every rank's shard to all ranks.

        Args:
            bucket: a flat tensor of which this rank's shard holds what the others need.
        """

    def all_reduce(self, bucket: torch.Tensor, *, average: bool = False) -> Pending:
        """Add all ranks' tensors up on every rank.

        Args:
            bucket: a flat tensor of any size.
            average: divide the sum by the number of ranks.
        """


@frozen
class Alone:
    """One rank: nothing to do."""

    size: int = 1
    rank: int = 0

    def reduce_scatter(self, bucket: torch.Tensor, *, average: bool = False) -> Pending:
        """Leave the tensor as it is.

        Args:
            bucket: the tensor.
            average: not used.
        """
        return DONE

    def all_gather(self, bucket: torch.Tensor) -> Pending:
        """Leave the tensor as it is.

        Args:
            bucket: the tensor.
        """
        return DONE

    def all_reduce(self, bucket: torch.Tensor, *, average: bool = False) -> Pending:
        """Leave the tensor as it is.

        Args:
            bucket: the tensor.
            average: not used.
        """
        return DONE


@define(eq=False)
class Native:
    """The backend's own collectives.

    Args:
        group: the process group.
    """

    group: ProcessGroup
    size: int = field(init=False)
    rank: int = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.size, self.rank = size_of(self.group), rank_in(self.group)

    def reduce_scatter(self, bucket: torch.Tensor, *, average: bool = False) -> Pending:
        """Call `reduce_scatter_tensor`.

        Args:
            bucket: a flat tensor.
            average: use the backend's AVG.
        """
        op = dist.ReduceOp.AVG if average else dist.ReduceOp.SUM
        mine = shard_of(bucket, self.rank, self.size)
        return self._start("reduce-scatter", dist.reduce_scatter_tensor, mine, bucket, op=op)

    def all_gather(self, bucket: torch.Tensor) -> Pending:
        """Call `all_gather_into_tensor`.

        Args:
            bucket: a flat tensor.
        """
        return self._start(
            "all-gather", dist.all_gather_into_tensor, bucket, shard_of(bucket, self.rank, self.size)
        )

    def all_reduce(self, bucket: torch.Tensor, *, average: bool = False) -> Pending:
        """Call `all_reduce`.

        Args:
            bucket: a flat tensor.
            average: use the backend's AVG.
        """
        op = dist.ReduceOp.AVG if average else dist.ReduceOp.SUM
        return self._start("all-reduce", dist.all_reduce, bucket, op=op)

    def _start(
        self, name: str, collective: Callable[..., Any], *tensors: torch.Tensor, **options: Any
    ) -> Pending:
        what = f"{name} of {tensors[0].numel():,} elements over {self.size} ranks"
        return Pending(what, [collective(*tensors, group=self.group, async_op=True, **options)])


@define(eq=False)
class PointToPoint:
    """Every pair of ranks exchanges its shards directly, all at the same time.

    Args:
        group: the process group; its backend has no AVG and slow collectives, but sends and receives in parallel.
    """

    group: ProcessGroup
    size: int = field(init=False)
    rank: int = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.size, self.rank = size_of(self.group), rank_in(self.group)

    @property
    def _peers(self) -> list[int]:
        """The other ranks, each rank beginning behind itself, so that not all send to one."""
        return [(self.rank + step) % self.size for step in range(1, self.size)]

    def reduce_scatter(self, bucket: torch.Tensor, *, average: bool = False) -> Pending:
        """Receive every rank's version of this rank's shard, and add them up.

        Args:
            bucket: a flat tensor.
            average: divide by the number of ranks.
        """
        mine = shard_of(bucket, self.rank, self.size)
        received = torch.empty((self.size, mine.numel()), dtype=bucket.dtype, device=bucket.device)
        receive = [(peer, received[peer]) for peer in self._peers]
        send = [(peer, shard_of(bucket, peer, self.size)) for peer in self._peers]

        def add_up() -> None:
            for peer in sorted(self._peers):
                mine.add_(received[peer])
            if average:
                mine.div_(self.size)

        return self._exchange("reduce-scatter", bucket, send, receive, add_up)

    def all_gather(self, bucket: torch.Tensor) -> Pending:
        """Send this rank's shard to every rank, and receive theirs.

        Args:
            bucket: a flat tensor.
        """
        mine = shard_of(bucket, self.rank, self.size)
        send = [(peer, mine) for peer in self._peers]
        receive = [(peer, shard_of(bucket, peer, self.size)) for peer in self._peers]
        return self._exchange("all-gather", bucket, send, receive, None)

    def all_reduce(self, bucket: torch.Tensor, *, average: bool = False) -> Pending:
        """Call `all_reduce`, which gloo does well.

        Args:
            bucket: a flat tensor.
            average: divide by the number of ranks.
        """
        what = f"all-reduce of {bucket.numel():,} elements over {self.size} ranks"
        work = dist.all_reduce(bucket, group=self.group, async_op=True)

        def divide() -> None:
            bucket.div_(self.size)

        return Pending(what, [work], divide if average else None)

    def _exchange(
        self,
        name: str,
        bucket: torch.Tensor,
        send: Sequence[tuple[int, torch.Tensor]],
        receive: Sequence[tuple[int, torch.Tensor]],
        then: Callable[[], None] | None,
    ) -> Pending:
        what = f"{name} of {bucket.numel():,} elements over {self.size} ranks"
        works = [dist.irecv(tensor, group=self.group, group_src=peer) for peer, tensor in receive]
        works += [dist.isend(tensor, group=self.group, group_dst=peer) for peer, tensor in send]
        return Pending(what, works, then)


def communicator(group: ProcessGroup | None, device: torch.device) -> Communicator:
    """Return the collectives for a group.

    Args:
        group: the process group; None: this process alone.
        device: of the tensors; a group may have one backend a device.
    """
    if group is None or size_of(group) == 1:
        return Alone()
    return PointToPoint(group) if "gloo" in _backend(group, device) else Native(group)


def _backend(group: ProcessGroup, device: torch.device) -> str:
    name: str = dist.get_backend(group)
    for entry in dist.get_backend_config(group).split(","):
        kind, _, backend = entry.partition(":")
        if kind == device.type and backend:
            name = backend
    return name
