"""The elements of a shard inside what a rank holds of its tensor: views where strides allow."""

from __future__ import annotations

import torch

from megaopt_core.errors import ShardingError
from megaopt_core.params._shards import Box, Shard, intersect, numel_of

__all__ = ["elements_of", "extent_of", "store_elements"]


def elements_of(local: torch.Tensor, box: Box, shard: Shard) -> torch.Tensor:
    """Return a shard's elements, flat; a view of `local` where its strides allow, else a copy.

    Args:
        local: what this rank holds of the tensor.
        box: which part of the logical tensor that is.
        shard: which elements; all of them lie in `box`.

    Raises:
        ShardingError: some of them do not.

    Example:
        >>> from megaopt_core.params import Shard
        >>> rows = Shard("w", (4, 2), ((2, 0), (2, 2)), 1, 4)
        >>> elements_of(torch.arange(8).view(4, 2), ((0, 0), (4, 2)), rows).tolist()
        [5, 6, 7]
    """
    return _inside(local, box, shard).reshape(-1)[shard.start : shard.stop]


def store_elements(local: torch.Tensor, box: Box, shard: Shard, values: torch.Tensor) -> None:
    """Write a shard's elements into what this rank holds of the tensor; nothing else is changed.

    Args:
        local: what this rank holds of the tensor.
        box: which part of the logical tensor that is.
        shard: which elements; all of them lie in `box`.
        values: the new values, in the shard's order.

    Raises:
        ShardingError: some of the elements do not lie in `box`.
    """
    inside = _inside(local, box, shard)
    flat = values.reshape(-1)
    if shard.is_box:
        inside.copy_(flat.view(inside.shape))
    elif inside.is_contiguous():
        inside.view(-1)[shard.start : shard.stop].copy_(flat)
    else:
        changed = inside.reshape(-1)
        changed[shard.start : shard.stop].copy_(flat)
        inside.copy_(changed.view(inside.shape))


def extent_of(box: Box, shard: Shard) -> tuple[int, int]:
    """Return where a shard begins and ends in the flattened local tensor; what lies between may be another's.

    Args:
        box: which part of the logical tensor the local tensor is.
        shard: elements that lie in `box`; not empty.

    Example:
        >>> from megaopt_core.params import Shard
        >>> extent_of(((0, 0), (4, 2)), Shard("w", (4, 2), ((1, 0), (2, 2)), 0, 4))
        (2, 6)
    """
    if shard.box == box:
        return shard.start, shard.stop
    first = last = 0
    for inside, size, offset, extent in zip(*shard.box, *box, strict=True):
        first = first * extent + inside - offset
        last = last * extent + inside - offset + size - 1
    return first, last + 1


def _inside(local: torch.Tensor, box: Box, shard: Shard) -> torch.Tensor:
    """Return the shard's box inside a local tensor, as a view."""
    if shard.box == box:
        return local.detach()
    if intersect(shard.box, box) != shard.box and numel_of(shard.box):
        raise ShardingError(
            f"{shard.name!r}: this rank holds the box {box}, which does not contain the box {shard.box}"
        )
    inside = local.detach()
    for dim, (offset, size) in enumerate(zip(*shard.box, strict=True)):
        inside = inside.narrow(dim, max(offset - box[0][dim], 0) if size else 0, size)
    return inside
