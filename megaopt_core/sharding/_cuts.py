"""Whether an optimizer can step a piece as it is: a layout may cut through nothing that must be whole."""

from __future__ import annotations

from collections.abc import Iterator

from megaopt_core.params._shards import Box, intersect, numel_of, part_of
from megaopt_core.params._specs import Granularity, ParamSpec
from megaopt_core.sharding._layout import PieceSpec, World

__all__ = ["cut_of"]


def cut_of(piece: PieceSpec, spec: ParamSpec, world: World, *, is_split: bool | None = None) -> str | None:
    """Return why an optimizer cannot step a piece as it is: its shape, or a cut through what must be whole.

    Args:
        piece: what a rank steps.
        spec: the parameter, or one of several that share the piece.
        world: number of ranks along each axis.
        is_split: the step is made in three parts, of which two take any slice; None: as `spec` says.
    """
    shard, is_split = piece.members[0][1], spec.splits if is_split is None else is_split
    is_box = len(piece.members) == 1 and shard.is_box and piece.shape == shard.box[1]
    needs_whole = spec.granularity is not Granularity.ELEMENT and not is_split
    if not is_box and (needs_whole or not _is_flat(piece)):
        return f"is stepped in the shape {piece.shape}; its box has {shard.box[1]}"
    if not needs_whole or piece.shape == spec.shape or not shard.numel:
        return None
    if piece.peers is not None and piece.peers.dim is not None:
        return None
    batch = 0 if spec.view is None or spec.granularity is Granularity.GROUP else spec.view.batch_dims
    if all(_keeps(shard.box, part, batch) for part in _parts_of_model(spec, world)):
        return None
    return (
        f"is cut into the box {shard.box} of {spec.shape}, but {spec.optimizer!r} steps whole tensors. Give "
        "the parameter one owner; or peers, if the entry has supports_peers; or an exchange, if the entry "
        "offers a split step"
    )


def _is_flat(piece: PieceSpec) -> bool:
    """Return whether a piece is a vector in which its members lie one after the other."""
    end = 0
    for offset, shard in piece.members:
        if offset < end:
            return False
        end = offset + shard.numel
    return len(piece.shape) == 1 and end <= piece.shape[0]


def _parts_of_model(spec: ParamSpec, world: World) -> Iterator[Box]:
    """Yield the parts that the axes of the model cut a tensor into, before any strategy does."""
    over_data = spec.divided_over_data
    cuts = [
        placement for placement in spec.dividing if placement not in over_data and placement.dim is not None
    ]
    for rank in world.ranks(*(placement.axis for placement in cuts)):
        yield part_of(spec.shape, cuts, rank)


def _keeps(box: Box, part: Box, batch: int) -> bool:
    """Return whether a box has all of a part or nothing of it, but for the first dimensions: those of a batch."""
    common = intersect(box, part)
    return not numel_of(common) or common[1][batch:] == part[1][batch:]
