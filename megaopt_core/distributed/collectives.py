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

__all__ = ["CHUNK", "DONE", "Communicator", "Native", "Pending", "PointToPoint", "communicator", "shard_of"]


CHUNK = 2**20
"""Elements that are sent as one message between two ranks."""


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
        try:
            if then is not None:
                then()
            for work in works:
                work.wait()
        except RuntimeError as error:
            raise CommunicationError(
                f"{self.what} failed: another rank has stopped, or the process group's timeout is over "
                f"({str(error).splitlines()[0]}). Restart all ranks from the last checkpoint"
            ) from error
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
    """Every pair of ranks exchanges its shards directly, all at the same time, in chunks.

    Chunks of :data:`CHUNK` elements are added up while the next ones arrive, and while they are in the processor's cache.
    What is received lies in memory that is kept from one call to the next: fresh memory costs more than the transfer.

    Args:
        group: the process group; its backend has no AVG and slow collectives, but sends and receives in parallel.
    """

    group: ProcessGroup
    size: int = field(init=False)
    rank: int = field(init=False)
    _unused: list[torch.Tensor] = field(factory=list, init=False)

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
        memory = self._borrow(mine.numel() * (self.size - 1), bucket)
        received = memory[: mine.numel() * (self.size - 1)].view(self.size - 1, mine.numel())
        arrivals, sends = [], []
        for start in range(0, mine.numel(), CHUNK):
            chunk = slice(start, min(start + CHUNK, mine.numel()))
            receives = [
                self._receive(peer, row[chunk]) for peer, row in zip(self._peers, received, strict=True)
            ]
            sends += [self._send(peer, shard_of(bucket, peer, self.size)[chunk]) for peer in self._peers]
            arrivals.append((chunk, receives))

        def add_up() -> None:
            for chunk, receives in arrivals:
                for work in receives:
                    work.wait()
                for row in received:
                    mine[chunk].add_(row[chunk])
                if average:
                    mine[chunk].div_(self.size)

        return Pending(
            self._what("reduce-scatter", bucket), sends, add_up, lambda: self._unused.append(memory)
        )

    def all_gather(self, bucket: torch.Tensor) -> Pending:
        """Send this rank's shard to every rank, and receive theirs.

        Args:
            bucket: a flat tensor.
        """
        mine = shard_of(bucket, self.rank, self.size)
        works = []
        for start in range(0, mine.numel(), CHUNK):
            chunk = slice(start, min(start + CHUNK, mine.numel()))
            works += [self._receive(peer, shard_of(bucket, peer, self.size)[chunk]) for peer in self._peers]
            works += [self._send(peer, mine[chunk]) for peer in self._peers]
        return Pending(self._what("all-gather", bucket), works)

    def all_reduce(self, bucket: torch.Tensor, *, average: bool = False) -> Pending:
        """Call `all_reduce`, which gloo does well.

        Args:
            bucket: a flat tensor.
            average: divide by the number of ranks.
        """
        work = dist.all_reduce(bucket, group=self.group, async_op=True)

        def divide() -> None:
            bucket.div_(self.size)

        return Pending(self._what("all-reduce", bucket), [work], done=divide if average else None)

    def _receive(self, peer: int, tensor: torch.Tensor) -> Any:
        return dist.irecv(tensor, group=self.group, group_src=peer)

    def _send(self, peer: int, tensor: torch.Tensor) -> Any:
        return dist.isend(tensor, group=self.group, group_dst=peer)

    def _what(self, name: str, bucket: torch.Tensor) -> str:
        return f"{name} of {bucket.numel():,} elements over {self.size} ranks"

    def _borrow(self, numel: int, like: torch.Tensor) -> torch.Tensor:
        """Return memory for at least `numel` elements that nobody uses."""
        for index, memory in enumerate(self._unused):
            if memory.numel() >= numel and memory.dtype == like.dtype and memory.device == like.device:
                return self._unused.pop(index)
        return torch.empty(numel, dtype=like.dtype, device=like.device)


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
