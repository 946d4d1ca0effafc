"""Whether all ranks together own every element of every parameter once, as the layout alone shows."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from attrs import define, field

from megaopt_core.errors import OwnershipError
from megaopt_core.params import (
    DEFAULT_ALIGNMENT,
    Box,
    Granularity,
    ParamSpec,
    RankCoordinates,
    Shard,
    intersect,
    numel_of,
    whole,
)
from megaopt_core.sharding import ParamLayout, Peers, PieceSpec, World, cut_of, owning_axes

__all__ = ["require_partition"]

_MOST_SLICES = 2**18
"""Slices of parameters after which no further rank is asked for its own: a few seconds of work."""

type _Key = tuple[Box, int, int]
"""A slice of one parameter: a box and a range inside it."""

type _Block = tuple[tuple[tuple[str, int], ...], str, int, int, int | None, Box | None]
"""Peers: where they stand on other axes, axis, size, number of the block, `dim`, and the box that replicas share."""


type _Owners = list[tuple[RankCoordinates, Peers | None]]
"""The owners of one slice, as far as they are seen, and where each stands."""


def require_partition(strategy: str, layout: ParamLayout, specs: Sequence[ParamSpec], world: World) -> None:
    """Raise unless the pieces of all ranks are a partition of every parameter that its optimizer can step.

    Pure: every rank looks at the pieces of all ranks, and nobody communicates. Ranks along the axes that divide the
    model may hold the same elements of a parameter that these axes do not cut: each steps its own copy. Along the axis
    that shares the optimizer out (`dp`, `expert_dp`) every element is owned once, or by the replicas of one block of
    :class:`~megaopt_core.sharding.Peers`; or the layout replicates, and every rank steps everything.

    A piece is one box in its shape, or flat. Where an optimizer steps whole tensors a piece is not flat, and its box is
    all that the model's axes leave of the tensor, or some matrices of a batch; only peers and a split step allow less.

    An alignment of more than 8 elements is a condition and checked; 8 is what gives equal bits on both sides of a cut,
    and a strategy may cut closer.

    Where every rank has a slice of nearly every parameter, ranks are asked in their order until 2**18 slices have been
    seen: elements that two of these own are found, elements that nobody owns are not.

    Args:
        strategy: its name, for errors.
        layout: what it returned.
        specs: the parameters that it was given.
        world: number of ranks along each axis.

    Raises:
        OwnershipError: elements of a parameter are owned by no rank or more than once, peers do not fit, a cut is not
            aligned, a piece mixes groups or has another shape, a tensor is cut that must be whole, or a piece holds a
            parameter that the strategy was not given.
    """
    for is_expert in (False, True):
        mine = {spec.name: spec for spec in specs if spec.is_expert is is_expert}
        others = {spec.name for spec in specs if spec.is_expert is not is_expert}
        if mine:
            _Ownership(strategy, layout, mine, others, world).prove()


@define(eq=False)
class _Ownership:
    strategy: str
    layout: ParamLayout
    specs: Mapping[str, ParamSpec]
    others: set[str]
    world: World
    seen: int = field(default=0, init=False)
    blocks: dict[str, dict[_Block, dict[int, Box]]] = field(factory=dict, init=False)
    homes: dict[int, int] = field(factory=dict, init=False)
    axis: str = field(init=False)
    axes: tuple[str, ...] = field(init=False)
    model_axes: tuple[str, ...] = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.axis = next(iter(self.specs.values())).data_axis
        self.axes = owning_axes(self.layout, list(self.specs.values()), self.world)
        self.model_axes = tuple(axis for axis in self.axes if axis != self.axis)

    def prove(self) -> None:
        owned: dict[str, dict[_Key, _Owners]] = {name: {} for name in self.specs}
        is_complete = True
        for rank in self.world.ranks(*self.axes):
            if self.seen >= _MOST_SLICES:
                is_complete = False
                break
            self._add(rank, owned)
        wrong = {
            name: reason
            for name, slices in owned.items()
            if (reason := self._wrong(self.specs[name], slices, is_complete=is_complete)) is not None
        }
        if is_complete:
            wrong |= {
                name: reason
                for name, blocks in self.blocks.items()
                if name not in wrong and (reason := _wrong_in_blocks(blocks)) is not None
            }
        if wrong:
            name, reason = next(iter(wrong.items()))
            raise OwnershipError(
                f"sharding strategy {self.strategy!r} must give each element one owner among "
                f"{self.world.size(self.axis)} {'expert ' * (self.axis == 'expert_dp')}data-parallel ranks, "
                f"but {reason} of {name!r} ({len(wrong)} parameters are wrong)",
                names=wrong,
            )

    def _add(self, rank: RankCoordinates, owned: Mapping[str, dict[_Key, _Owners]]) -> None:
        for piece in self.layout.pieces(rank):
            for _, shard in piece.members:
                spec = self.specs.get(shard.name)
                if spec is not None:
                    self._require_piece(piece, shard, spec, rank)
                    if shard.numel or not spec.numel:
                        slices = owned[shard.name].setdefault((shard.box, shard.start, shard.stop), [])
                        slices.append((rank, piece.peers))
                elif shard.name not in self.others:
                    self._refuse(shard, "was not given to it")
            self.seen += len(piece.members)

    def _require_piece(self, piece: PieceSpec, shard: Shard, spec: ParamSpec, rank: RankCoordinates) -> None:
        if spec.group != piece.group:
            self._refuse(shard, f"belongs to group {spec.group}, not to {piece.group}")
        if shard.shape != spec.shape:
            self._refuse(shard, f"has the shape {spec.shape}, not {shard.shape}")
        reason = cut_of(piece, spec, self.world)
        if reason is not None:
            self._refuse(shard, reason)
        if spec.granularity is Granularity.GROUP and shard.numel:
            home = rank.get(self.axis, 0) // (piece.peers.size if piece.peers else 1)
            if self.homes.setdefault(spec.group, home) != home:
                self._refuse(
                    shard,
                    f"is apart from the rest of its group: {spec.optimizer!r} must have the whole group",
                )
        if spec.alignment > DEFAULT_ALIGNMENT:
            self._require_aligned(shard, spec, rank)
        if piece.peers is not None:
            self._require_peers(piece.peers, shard, spec, rank)

    def _require_aligned(self, shard: Shard, spec: ParamSpec, rank: RankCoordinates) -> None:
        allowed = f"{spec.optimizer!r} may be cut only at multiples of {spec.alignment} elements"
        local = spec.box(rank)
        for cut in (shard.start, shard.stop):
            if cut % spec.alignment and cut != numel_of(shard.box):
                self._refuse(shard, f"is cut at {cut}: {allowed}")
        if shard.box != local and not _is_aligned(shard.box, local, spec.alignment):
            self._refuse(shard, f"is cut into the box {shard.box} of {local}: {allowed}")

    def _require_peers(self, peers: Peers, shard: Shard, spec: ParamSpec, rank: RankCoordinates) -> None:
        size, place = self.world.size(peers.axis), rank.get(peers.axis, 0)
        if size % peers.size or place % peers.size != peers.index:
            self._refuse(
                shard,
                f"has peers in blocks of {peers.size} along {peers.axis!r}, which has {size} ranks, at place "
                f"{peers.index} of a block on rank {place}",
            )
        if peers.dim is not None and not spec.takes_peers:
            self._refuse(
                shard, f"is stepped by {spec.optimizer!r}, which takes no parts (it has no supports_peers)"
            )
        if peers.size > 1 and peers.axis in (self.axis, *self.model_axes):
            others = tuple(sorted(entry for entry in rank.items() if entry[0] != peers.axis))
            box = shard.box if peers.dim is None else None
            block = others, peers.axis, peers.size, place // peers.size, peers.dim, box
            self.blocks.setdefault(shard.name, {}).setdefault(block, {})[peers.index] = shard.box

    def _refuse(self, shard: Shard, reason: str) -> None:
        raise OwnershipError(
            f"sharding strategy {self.strategy!r} has a piece with {shard.name!r}, which {reason}",
            names=[shard.name],
        )

    def _wrong(self, spec: ParamSpec, slices: Mapping[_Key, _Owners], *, is_complete: bool) -> str | None:
        """Return what is wrong with the slices of one parameter, None when they are a partition."""
        by_box: dict[Box, list[tuple[int, int]]] = {}
        for (box, start, stop), owners in slices.items():
            if start < stop and not self._is_one(owners, spec):
                return f"more than one rank owns elements [{start}, {stop})"
            by_box.setdefault(box, []).append((start, stop))
        reason = _wrong_in_boxes(by_box, is_complete=is_complete)
        return reason or _wrong_boxes(spec, list(by_box), is_complete=is_complete)

    def _is_one(self, owners: _Owners, spec: ParamSpec) -> bool:
        """Return whether the owners of a slice count as one: copies along axes of the model, or replicas."""
        if len(owners) == 1:
            return True
        places = {rank.get(self.axis, 0) for rank, _ in owners}
        if len(places) > 1 and not _is_one_block(owners, self.axis):
            return False
        # Ranks along an axis that cuts the tensor have different parts of it, unless one owns them all.
        cutting = {placement.axis for placement in spec.dividing}.intersection(self.model_axes)
        return all(len({rank.get(axis, 0) for rank, _ in owners}) == 1 for axis in cutting)


def _is_one_block(owners: _Owners, axis: str) -> bool:
    blocks = {
        None
        if peers is None or peers.axis != axis or peers.dim is not None
        else (peers.size, rank.get(axis, 0) // peers.size)
        for rank, peers in owners
    }
    return len(blocks) == 1 and None not in blocks


def _wrong_in_blocks(blocks: Mapping[_Block, Mapping[int, Box]]) -> str | None:
    """Return what is wrong with the peers of one parameter, all of which must be there: they wait for each other."""
    for (_, axis, size, _, dim, _), boxes in blocks.items():
        if len(boxes) < size:
            return f"only {len(boxes)} of the {size} peers along {axis!r} have a piece"
        if dim is not None:
            across = {
                tuple(entry for at, entry in enumerate(zip(*box, strict=True)) if at != dim)
                for box in boxes.values()
            }
            if len(across) > 1:
                return f"the parts of {size} peers along {axis!r} are not cut along dimension {dim} alone"
    return None


def _is_aligned(box: Box, local: Box, alignment: int) -> bool:
    """Return whether a box is cut out of a rank's part at multiples of so many elements, as memory is laid out.

    Only along the last dimension that is cut do neighbours in memory come apart. A box that is not inside the part
    was put together from the parts of several ranks: the strategy has moved elements, and made no cut.
    """
    if intersect(box, local) != box:
        return True
    trailing = 1
    for dim in reversed(range(len(box[1]))):
        offset, size = box[0][dim] - local[0][dim], box[1][dim]
        if size != local[1][dim]:
            ends = offset + size == local[1][dim]
            return not (offset * trailing % alignment or (size * trailing % alignment and not ends))
        trailing *= size
    return True


def _wrong_in_boxes(boxes: Mapping[Box, list[tuple[int, int]]], *, is_complete: bool) -> str | None:
    """Return what is wrong with the ranges inside each box."""
    for box, ranges in boxes.items():
        position, numel = 0, math.prod(box[1])
        for start, stop in sorted(ranges):
            if start < min(position, stop):
                return f"more than one rank owns elements [{start}, {min(stop, position)})"
            if start > position and is_complete:
                return f"no rank owns elements [{position}, {start})"
            position = max(position, stop)
        if position < numel and is_complete:
            return f"no rank owns elements [{position}, {numel})"
    return None


def _wrong_boxes(spec: ParamSpec, boxes: Sequence[Box], *, is_complete: bool) -> str | None:
    """Return what is wrong with the boxes themselves, which have to tile the parameter."""
    all_of_it = whole(spec.shape)
    if list(boxes) == [all_of_it]:
        return None
    for box in boxes:
        if intersect(box, all_of_it) != box:
            return f"a rank owns elements of the box {box}, which lies partly outside of {all_of_it}"
    overlap = _overlap(boxes)
    if overlap is not None:
        return f"more than one rank owns the intersection of the boxes {overlap[0]} and {overlap[1]}"
    missing = spec.numel - sum(numel_of(box) for box in boxes)
    if missing and is_complete:
        return f"no rank owns {missing} of the {spec.numel} elements"
    return None


def _overlap(boxes: Sequence[Box]) -> tuple[Box, Box] | None:
    """Return two boxes that overlap, looking along the dimension that is cut most."""
    if len(boxes) < 2:
        return None
    along = max(range(len(boxes[0][0])), key=lambda dim: len({offsets[dim] for offsets, _ in boxes}))
    active: list[Box] = []
    for box in sorted(boxes, key=lambda box: box[0][along]):
        active = [other for other in active if other[0][along] + other[1][along] > box[0][along]]
        for other in active:
            if numel_of(intersect(other, box)):
                return other, box
        active.append(box)
    return None
