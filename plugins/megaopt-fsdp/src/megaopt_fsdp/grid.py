"""The ranks among which tensors are cut, as places of a grid: pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from attrs import field, frozen

from megaopt_core.params import RankCoordinates
from megaopt_core.sharding import World

__all__ = ["Grid"]

_DENSE = ("dp_replicate", "dp", "tp")
_EXPERT = ("expert_dp_replicate", "expert_dp", "ep", "expert_tp")


@frozen
class Grid:
    """All ranks of a pipeline stage by their coordinates, numbered with the last axis the fastest.

    Args:
        axes: names of the axes.
        sizes: number of ranks along each.

    Example:
        >>> grid = Grid.of(World({"dp": 2, "tp": 3}), is_expert=False)
        >>> grid.size, grid.place({"dp": 1, "tp": 2}), list(grid.along(4, ("dp",)))
        (6, 5, [1, 4])
    """

    axes: tuple[str, ...]
    sizes: tuple[int, ...]
    _groups: dict[tuple[str, ...], Mapping[tuple[int, ...], tuple[int, ...]]] = field(
        factory=dict, init=False, eq=False, repr=False
    )

    @classmethod
    def of(cls, world: World, *, is_expert: bool) -> Grid:
        """Return the grid of the ranks that share dense or expert tensors.

        Args:
            world: number of ranks along each axis.
            is_expert: of expert parameters, which have axes of their own.
        """
        axes = _EXPERT if is_expert else _DENSE
        return cls(axes, tuple(world.size(axis) for axis in axes))

    @classmethod
    def of_model(cls, world: World, *, is_expert: bool) -> Grid:
        """Return the grid of all ranks of a model, pipeline stages included.

        Args:
            world: number of ranks along each axis.
            is_expert: by the axes of expert parameters.
        """
        stage = cls.of(world, is_expert=is_expert)
        return cls(("pp", *stage.axes), (world.size("pp"), *stage.sizes))

    @property
    def size(self) -> int:
        """Number of places."""
        return math.prod(self.sizes)

    def place(self, rank: RankCoordinates) -> int:
        """Return the number of a rank's place.

        Args:
            rank: its coordinates.
        """
        place = 0
        for axis, size in zip(self.axes, self.sizes, strict=True):
            place = place * size + rank.get(axis, 0)
        return place

    def rank(self, place: int) -> dict[str, int]:
        """Return the coordinates of a place.

        Args:
            place: its number.
        """
        found = {}
        for axis, size in zip(reversed(self.axes), reversed(self.sizes), strict=True):
            place, found[axis] = divmod(place, size)
        return found

    def along(self, place: int, axes: Sequence[str]) -> Iterator[int]:
        """Yield the places that differ from one along some axes only, itself among them, in ascending order.

        Args:
            place: its number.
            axes: names of axes of the grid.
        """
        others = tuple(axis for axis in self.axes if axis not in axes)
        here = self.rank(place)
        yield from self.groups(others)[tuple(here[axis] for axis in others)]

    def groups(self, axes: tuple[str, ...]) -> Mapping[tuple[int, ...], tuple[int, ...]]:
        """Return all places by their coordinates along some axes.

        Args:
            axes: names of axes of the grid.
        """
        if axes not in self._groups:
            found: dict[tuple[int, ...], list[int]] = {}
            for place in range(self.size):
                here = self.rank(place)
                found.setdefault(tuple(here[axis] for axis in axes), []).append(place)
            self._groups[axes] = {at: tuple(places) for at, places in found.items()}
        return self._groups[axes]
