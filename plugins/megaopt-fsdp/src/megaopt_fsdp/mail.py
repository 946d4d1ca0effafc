"""Parts of tensors to owners and back, each direction one all-to-all."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from attrs import define, field

from megaopt_core.parallel import needs_all_ranks
from megaopt_core.sharding import Sent
from megaopt_fsdp.routes import Route

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["Mail", "Message"]


@define(eq=False)
class Message:
    """What is on its way from all ranks to this one.

    Args:
        work: ends when it has arrived; None: it has.
        received: where it arrives.
        sent: what leaves here, which must stay until then.
        what: says in errors what travels.
    """

    work: Any
    received: torch.Tensor
    sent: torch.Tensor | None
    what: str

    def wait(self) -> torch.Tensor:
        """Return what has arrived, and let go of what has left.

        Raises:
            CommunicationError: another rank has stopped, or the process group's timeout is over.
        """
        if self.work is not None:
            with needs_all_ranks(self.what):
                self.work.wait()
        self.work = self.sent = None
        return self.received


@define(eq=False)
class Mail:
    """Sends parts of blocks between the ranks of a group, and counts what it sends.

    Args:
        group: the ranks.
        sent: what this rank has sent to others since :meth:`begin`.
    """

    group: ProcessGroup
    sent: Sent = field(factory=Sent, init=False)

    @property
    def rank(self) -> int:
        """This process's rank in the group."""
        return self.group.rank()

    def begin(self) -> None:
        """Count from here: a step begins."""
        self.sent = Sent()

    def to_owners(
        self, routes: Sequence[Route], parts: Sequence[torch.Tensor], like: torch.Tensor
    ) -> Message:
        """Begin to send this rank's parts to the owners.

        Args:
            routes: what travels, in an order that all ranks share.
            parts: of each block what this rank holds, in `like`'s dtype.
            like: tells dtype and device.
        """
        rank = self.rank
        leaving: list[list[torch.Tensor]] = [[] for _ in range(self.group.size())]
        arriving = [0] * self.group.size()
        for route, part in zip(routes, parts, strict=True):
            if route.sends:
                leaving[route.owner].append(part)
            if route.owner == rank:
                for sender, box in route.senders:
                    arriving[sender] += math.prod(box[1])
        return self._send(leaving, arriving, like, "the exchange of updates with their owners")

    def blocks(self, routes: Sequence[Route], message: Message) -> list[torch.Tensor]:
        """Return the blocks that this rank owns, of the parts that have arrived.

        Args:
            routes: what was sent.
            message: what :meth:`to_owners` returned.
        """
        rank, received = self.rank, message.wait()
        mine = [route for route in routes if route.owner == rank]
        if len(mine) == 1 and _is_by_rows(mine[0]):
            return [received.view(mine[0].box[1])]
        wholes = [received.new_empty(route.box[1]) for route in mine]
        windows = self._windows(mine, wholes, back=False)
        position = 0
        for window in windows:
            numel = window.numel()
            window.copy_(received[position : position + numel].view(window.shape))
            position += numel
        return wholes

    def back(self, routes: Sequence[Route], wholes: Sequence[torch.Tensor], like: torch.Tensor) -> Message:
        """Begin to send blocks back to all ranks that hold parts of them.

        Args:
            routes: what travels, in an order that all ranks share.
            wholes: the blocks that this rank owns, in that order and in `like`'s dtype.
            like: tells dtype and device.
        """
        rank = self.rank
        mine = [route for route in routes if route.owner == rank]
        arriving = [0] * self.group.size()
        for route in routes:
            arriving[route.owner] += route.numel
        leaving: list[list[torch.Tensor]] = [[] for _ in range(self.group.size())]
        for route, whole in zip(mine, wholes, strict=True):
            for receiver, box in route.receivers:
                leaving[receiver].append(route.window(whole, box))
        return self._send(leaving, arriving, like, "the exchange of transformed updates with their owners")

    def parts(self, routes: Sequence[Route], message: Message) -> list[torch.Tensor]:
        """Return what has come back to this rank, flat, for each block.

        Args:
            routes: what was sent.
            message: what :meth:`back` returned.
        """
        received = message.wait()
        starts: dict[int, int] = {}
        position = 0
        for owner in range(self.group.size()):
            starts[owner] = position
            position += sum(route.numel for route in routes if route.owner == owner)
        found = []
        for route in routes:
            start = starts[route.owner]
            found.append(received[start : start + route.numel])
            starts[route.owner] = start + route.numel
        return found

    def _windows(
        self, mine: Sequence[Route], wholes: Sequence[torch.Tensor], *, back: bool
    ) -> Iterator[torch.Tensor]:
        """Yield the parts of blocks in the order of what has arrived: by rank, then by block."""
        for rank in range(self.group.size()):
            for route, whole in zip(mine, wholes, strict=True):
                for other, box in route.receivers if back else route.senders:
                    if other == rank:
                        yield route.window(whole, box)

    def _send(
        self,
        leaving: Sequence[Sequence[torch.Tensor]],
        arriving: Sequence[int],
        like: torch.Tensor,
        what: str,
    ) -> Message:
        sizes = [sum(tensor.numel() for tensor in some) for some in leaving]
        sent = like.new_empty(sum(sizes))
        position = 0
        for tensor in (tensor for some in leaving for tensor in some):
            sent[position : position + tensor.numel()].view(tensor.shape).copy_(tensor)
            position += tensor.numel()
        received = like.new_empty(sum(arriving))
        self.sent += Sent((sum(sizes) - sizes[self.rank]) * sent.element_size(), 1)
        with needs_all_ranks(what):
            work = dist.all_to_all_single(
                received, sent, list(arriving), sizes, group=self.group, async_op=True
            )
        return Message(work, received, sent, what)


def _is_by_rows(route: Route) -> bool:
    """Return whether parts that lie one after the other are the block as it is: rows, in their order."""
    position = route.box[0][0] if route.box[0] else 0
    for _, (offsets, sizes) in route.senders:
        if sizes[1:] != route.box[1][1:] or (sizes[0] and offsets[0] != position):
            return False
        position += sizes[0]
    return True
