"""Boxes of a tensor from the ranks that have them to the ranks that want them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from megaopt_core.parallel import needs_all_ranks
from megaopt_core.params import Box, intersect, numel_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["move_boxes", "rows_of"]


def rows_of(shape: Sequence[int], ranks: int) -> list[Box]:
    """Return the rows that each rank has of a tensor that is cut as `Shard(0)` cuts.

    Args:
        shape: of the tensor; at least one dimension.
        ranks: how many.

    Example:
        >>> rows_of((3, 5), 2)
        [((0, 0), (2, 5)), ((2, 0), (1, 5))]
    """
    rows = -(-shape[0] // ranks)
    starts = [min(rank * rows, shape[0]) for rank in range(ranks + 1)]
    return [
        ((start, *[0] * (len(shape) - 1)), (stop - start, *shape[1:])) for start, stop in pairwise(starts)
    ]


def move_boxes(
    held: Sequence[Sequence[Box]],
    wanted: Sequence[Sequence[Box]],
    local: Callable[[Box], torch.Tensor],
    like: torch.Tensor,
    group: ProcessGroup,
    what: str,
) -> list[torch.Tensor]:
    """Return the boxes that this rank wants: one all-to-all, in which every element travels as its bytes are.

    Args:
        held: for each rank of the group the boxes that it has; no two have an element in common.
        wanted: for each rank the boxes that it wants.
        local: returns what this rank has of one of its boxes, in the box's shape.
        like: tells dtype, and the device that the group sends from.
        group: the ranks.
        what: the exchange, in words, for the error.

    Raises:
        CommunicationError: another rank has stopped, or the process group's timeout is over.
    """
    rank = group.rank()
    leaving = [
        [
            _window(local(box), box, both).reshape(-1).to(like.device).view(torch.uint8)
            for box, both in _common(held[rank], boxes)
        ]
        for boxes in wanted
    ]
    arriving = [[both for _, both in _common(boxes, wanted[rank])] for boxes in held]
    sizes = [sum(numel_of(both) for both in some) * like.element_size() for some in arriving]
    sent = torch.cat([each for some in leaving for each in some] or [like.new_empty(0, dtype=torch.uint8)])
    received = like.new_empty(sum(sizes), dtype=torch.uint8)
    with needs_all_ranks(what):
        dist.all_to_all_single(
            received, sent, sizes, [sum(each.numel() for each in some) for some in leaving], group=group
        )
    return _put_together(wanted[rank], held, received.view(like.dtype))


def _common(held: Sequence[Box], wanted: Sequence[Box]) -> list[tuple[Box, Box]]:
    """Return each box that is held with what it shares with each that is wanted, in an order that all ranks know."""
    pairs = ((box, intersect(box, other)) for box in held for other in wanted)
    return [(box, both) for box, both in pairs if numel_of(both)]


def _window(tensor: torch.Tensor, box: Box, part: Box) -> torch.Tensor:
    """Return a part of a box as a view."""
    for dim, (offset, size) in enumerate(zip(*part, strict=True)):
        tensor = tensor.narrow(dim, offset - box[0][dim], size)
    return tensor


def _put_together(
    wanted: Sequence[Box], held: Sequence[Sequence[Box]], flat: torch.Tensor
) -> list[torch.Tensor]:
    """Return the boxes that are wanted, of what has arrived from each rank in turn."""
    found = [flat.new_empty(box[1]) for box in wanted]
    position = 0
    for boxes in held:
        for box in boxes:
            for at, other in enumerate(wanted):
                both = intersect(box, other)
                numel = numel_of(both)
                if numel:
                    part = flat[position : position + numel].view(both[1])
                    _window(found[at], other, both).copy_(part)
                    position += numel
    return found
