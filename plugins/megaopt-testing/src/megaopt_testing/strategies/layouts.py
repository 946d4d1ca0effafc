"""Who steps what, as pure data: uneven slices of rows, or whole tensors dealt in turn."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from attrs import frozen

from megaopt_core.params import Granularity, ParamSpec, RankCoordinates, Shard
from megaopt_core.sharding import PieceSpec

__all__ = ["OwnerLayout", "RowLayout", "travels"]


def travels(spec: ParamSpec) -> bool:
    """Say whether an optimizer must see a parameter whole to transform its update.

    Args:
        spec: the parameter.
    """
    return spec.granularity is not Granularity.ELEMENT


@frozen
class RowLayout:
    """Each rank has consecutive rows of every parameter; the first have more, the last may have none.

    Args:
        specs: the parameters.
        ranks: how many share them.
    """

    specs: tuple[ParamSpec, ...]
    ranks: int

    def shard(self, spec: ParamSpec, rank: int) -> Shard:
        """Return a rank's rows, in units that keep cuts aligned; a number goes to the first rank.

        Args:
            spec: the parameter.
            rank: the rank.
        """
        if not spec.shape:
            return spec.shard({}, 0, int(rank == 0))
        rows, width = spec.shape[0], math.prod(spec.shape[1:])
        unit = spec.alignment // math.gcd(spec.alignment, width or spec.alignment)
        share = -(-rows // (self.ranks * unit)) * unit
        first, last = rank * share, min((rank + 1) * share, rows)
        if first >= last:
            first = last = 0  # nothing, from the beginning: where a cut is allowed
        return spec.part(((first, *[0] * len(spec.shape[1:])), (last - first, *spec.shape[1:])))

    def pieces(self, rank: RankCoordinates) -> Sequence[PieceSpec]:
        """Return a piece of every parameter; those whose updates travel also where they are empty.

        Args:
            rank: its coordinates.
        """
        shards = [(spec, self.shard(spec, rank.get("dp", 0))) for spec in self.specs]
        return [PieceSpec.of(shard, spec.group) for spec, shard in shards if shard.numel or travels(spec)]

    def owners(self) -> Mapping[str, int]:
        """Return the rank that transforms each tensor whose update travels, dealt from the last rank down."""
        moving = [spec for spec in self.specs if travels(spec)]
        return {spec.name: self.ranks - 1 - turn % self.ranks for turn, spec in enumerate(moving)}


@frozen
class OwnerLayout:
    """Each rank steps whole parameters, dealt in turn; what an optimizer must see together has one owner.

    Args:
        specs: the parameters.
        ranks: how many share them.
    """

    specs: tuple[ParamSpec, ...]
    ranks: int

    def owner(self, turn: int, spec: ParamSpec) -> int:
        """Return the rank that steps a parameter.

        Args:
            turn: its place among all.
            spec: the parameter.
        """
        if spec.granularity is Granularity.GROUP:
            return 0  # with whatever it is stepped together
        return turn % self.ranks

    def pieces(self, rank: RankCoordinates) -> Sequence[PieceSpec]:
        """Return what a rank steps.

        Args:
            rank: its coordinates.
        """
        place = rank.get("dp", 0)
        return [
            PieceSpec.of(spec.shard({}), spec.group)
            for turn, spec in enumerate(self.specs)
            if self.owner(turn, spec) == place
        ]
