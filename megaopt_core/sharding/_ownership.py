"""The elements of every parameter that all ranks together step, and their owners, as the layout alone shows."""

from __future__ import annotations

import hashlib
import marshal
from collections.abc import Iterator, Mapping, Sequence

from attrs import astuple, define, field

from megaopt_core.errors import OwnershipError
from megaopt_core.params._shards import RankCoordinates, Shard
from megaopt_core.params._specs import ParamSpec
from megaopt_core.sharding._layout import Peers, PieceSpec, World
from megaopt_core.sharding._protocol import ParamLayout, spread_axes

__all__ = ["Owners", "owners_of", "owning_axes"]

_MOST_SLICES = 2**18
"""Slices of parameters after which no further rank is asked for its own: a few seconds of work."""

type _Owner = tuple[RankCoordinates, Shard, Peers | None]
"""A rank, the elements of a parameter that it steps, and the ranks that step them with it."""


@define(eq=False)
class Owners:
    """Who owns what by one rank's layout, of dense parameters or of those of experts.

    Args:
        is_expert: which of the two.
        by_name: the owners of each parameter.
        is_complete: every rank was asked.
    """

    is_expert: bool
    by_name: Mapping[str, list[_Owner]]
    is_complete: bool = False
    _pieces: hashlib._Hash = field(factory=hashlib.sha256)

    def note(self, rank: RankCoordinates, piece: PieceSpec) -> None:
        """Count the piece of a rank.

        Args:
            rank: its coordinates.
            piece: the piece.
        """
        mine = [(offset, shard) for offset, shard in piece.members if shard.name in self.by_name]
        if not mine:
            return
        peers = None if piece.peers is None else astuple(piece.peers)
        members = [(offset, shard.name, shard.box, shard.start, shard.stop) for offset, shard in mine]
        # Version 2 writes values, not which objects happen to be the same.
        self._pieces.update(marshal.dumps((tuple(rank.items()), piece.group, piece.shape, peers, members), 2))
        for _, shard in mine:
            self.by_name[shard.name].append((rank, shard, piece.peers))

    @property
    def digest(self) -> bytes:
        """Equal on two ranks whose layouts give the same pieces to the ranks that were asked."""
        return self._pieces.digest()

    def rows(self) -> list[tuple[str, Mapping[str, str]]]:
        """Return who steps each parameter, in words."""
        return [
            (f"parameter {name!r}", {"": "; ".join(map(_words, owners)) or "no rank steps it"})
            for name, owners in self.by_name.items()
        ]


def _words(owner: _Owner) -> str:
    rank, shard, _ = owner
    place = " ".join(f"{axis}={place}" for axis, place in rank.items()) or "one rank"
    offsets, sizes = shard.box
    return f"{place} has [{shard.start}, {shard.stop}) of {sizes} at {offsets}"


def owners_of(strategy: str, layout: ParamLayout, specs: Sequence[ParamSpec], world: World) -> list[Owners]:
    """Return who owns what, of dense parameters and of those of experts.

    Pure: every rank asks for the pieces of all ranks, and nobody communicates. Each parameter must have as many
    elements as all its owners step together. Copies along axes that do not cut it count once, and replicas of one block
    of :class:`~megaopt_core.sharding.Peers` too. Where the sum is right and the elements are not, the strategy is at
    fault, not the run: the conformance kit proves it.

    Where every rank has a slice of nearly every parameter, ranks are asked in their order until 2**18 slices have been
    seen: elements too many among these are found, elements that nobody owns are not.

    Args:
        strategy: its name, for errors.
        layout: what it returned.
        specs: the parameters that it was given.
        world: number of ranks along each axis.

    Raises:
        OwnershipError: ranks step more or fewer elements of a parameter than it has.
    """
    kinds = ([spec for spec in specs if spec.is_expert is is_expert] for is_expert in (False, True))
    return [_counted(strategy, layout, kind, world) for kind in kinds if kind]


def _counted(strategy: str, layout: ParamLayout, specs: Sequence[ParamSpec], world: World) -> Owners:
    owners = Owners(specs[0].is_expert, {spec.name: [] for spec in specs})
    seen = 0
    for rank in world.ranks(*owning_axes(layout, specs, world)):
        if seen >= _MOST_SLICES:
            break
        for piece in layout.pieces(rank):
            owners.note(rank, piece)
            seen += len(piece.members)
    else:
        owners.is_complete = True
    _require_sums(strategy, owners, specs, specs[0].data_axis, world)
    return owners


def owning_axes(layout: ParamLayout, specs: Sequence[ParamSpec], world: World) -> tuple[str, ...]:
    """Return the axes along which ranks own other elements of parameters.

    They are those that divide the model, then the one that shares the optimizer out, unless all ranks along it have
    everything.

    Args:
        layout: what a strategy returned.
        specs: the parameters that it was given, all of experts or none.
        world: number of ranks along each axis.
    """
    axis = specs[0].data_axis
    cutting = {placement.axis for spec in specs for placement in spec.dividing}
    model_axes = {*cutting, *spread_axes(layout, is_expert=specs[0].is_expert)} - {axis}
    replicates = axis not in cutting and _replicates(layout, specs, axis, world.size(axis))
    return (*sorted(model_axes), *([] if replicates else [axis]))


def _replicates(layout: ParamLayout, specs: Sequence[ParamSpec], axis: str, size: int) -> bool:
    """Return whether the first rank and the last along the data axis both have all that there is."""
    if size == 1:
        return False
    first, last = {axis: 0}, {axis: size - 1}
    everything = {spec.name: spec.shard(first).numel for spec in specs}
    return _held(layout, first, everything) == _held(layout, last, everything) == everything


def _held(layout: ParamLayout, rank: RankCoordinates, names: Mapping[str, int]) -> dict[str, int]:
    held = dict.fromkeys(names, 0)
    for piece in layout.pieces(rank):
        for _, shard in piece.members:
            if shard.name in held and piece.peers is None:
                held[shard.name] += shard.numel
    return held


def _require_sums(strategy: str, owners: Owners, specs: Sequence[ParamSpec], axis: str, world: World) -> None:
    wrong = {}
    for spec in specs:
        count = sum(numel for numel in _counts(spec, owners.by_name[spec.name], axis))
        if count > spec.numel or (owners.is_complete and count < spec.numel):
            wrong[spec.name] = f"they step {count:,} elements of {spec.name!r}, which has {spec.numel:,}"
    if wrong:
        raise OwnershipError(
            f"sharding strategy {strategy!r} must give each element one owner among {world.size(axis)} "
            f"{'expert ' * owners.is_expert}data-parallel ranks, but {next(iter(wrong.values()))} "
            f"({len(wrong)} parameters are wrong)",
            names=wrong,
        )


def _counts(spec: ParamSpec, owners: Sequence[_Owner], axis: str) -> Iterator[int]:
    """Yield the elements of each owner that is no copy of one before."""
    cutting, seen = {placement.axis for placement in spec.dividing} - {axis}, set()
    for rank, shard, peers in owners:
        place = rank.get(axis, 0)
        if peers is not None and peers.axis == axis and peers.dim is None:
            place //= peers.size
        owner = (shard, place, *(rank.get(other, 0) for other in cutting))
        if owner not in seen:
            seen.add(owner)
            yield shard.numel
