"""What one owner transforms: all of a tensor, or the matrices of a batch that some ranks have between them. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from attrs import evolve, frozen
from megaopt_layerwise.planner import Work, work_of

from megaopt_core.params import AxisPlacement, Box, ParamSpec, whole
from megaopt_fsdp.grid import Grid

__all__ = ["Block", "block_box", "blocks_of", "cuts_matrices"]


@frozen
class Block:
    """Whole matrices of one parameter, with the ranks that have a part of them or a copy of one.

    Args:
        spec: the parameter.
        box: the matrices; all of the parameter where ranks cut no batch of matrices.
        holders: places of these ranks, ascending.
    """

    spec: ParamSpec
    box: Box
    holders: tuple[int, ...]

    @property
    def name(self) -> str:
        """Tells it from the other blocks of its parameter."""
        return f"{self.spec.name}@{','.join(map(str, self.box[0]))}"

    def senders(self, owner: int, grid: Grid) -> tuple[int, ...]:
        """Return the places of ranks whose parts make up the block: one copy of each.

        Args:
            owner: place of the owner.
            grid: the ranks.
        """
        axes = [placement.axis for placement in self.spec.dividing if cuts_matrices(self.spec, placement)]
        return tuple(grid.along(owner, axes))

    @property
    def work(self) -> Work:
        """What transforming it costs, for the planner; bytes are what its owner has of it."""
        unit = evolve(self.spec, shape=self.box[1], placements=())
        share = unit.numel / self.spec.numel if self.spec.numel else 0.0
        # Of a split step the owner has updates only; of a whole one state and values.
        work = work_of(unit, state_bytes_per_element=4.0 if self.spec.splits else 12.0)
        return evolve(work, name=self.name, cost=self.spec.cost * share, ranks=self.holders)


def cuts_matrices(spec: ParamSpec, placement: AxisPlacement) -> bool:
    """Return whether an axis cuts the matrices of a parameter, and not only between those of a batch.

    Args:
        spec: the parameter.
        placement: one of its placements.
    """
    batch = 0 if spec.view is None else spec.view.batch_dims
    return placement.divides and placement.dim is not None and placement.dim >= batch


def block_box(spec: ParamSpec, rank: dict[str, int]) -> Box:
    """Return the whole matrices of which a rank has a part.

    Args:
        spec: the parameter.
        rank: the rank's coordinates.
    """
    box = whole(spec.shape)
    for placement in spec.placements:
        if not cuts_matrices(spec, placement):
            box = placement.part(box, rank.get(placement.axis, 0))
    return box


def blocks_of(spec: ParamSpec, grid: Grid) -> Sequence[Block]:
    """Return the blocks of a parameter.

    Args:
        spec: the parameter.
        grid: the ranks.

    Example:
        >>> import torch
        >>> from megaopt_core.params import Granularity
        >>> from megaopt_core.sharding import World
        >>> rows = AxisPlacement("dp", 2, dim=0)
        >>> tensor = Granularity.TENSOR
        >>> spec = ParamSpec("w", (4, 2), torch.float32, torch.float32, "any", 0, tensor, 1.0, placements=(rows,))
        >>> [(block.box, block.holders) for block in blocks_of(spec, Grid.of(World({"dp": 2}), is_expert=False))]
        [(((0, 0), (4, 2)), (0, 1))]
    """
    between = tuple(
        sorted({each.axis for each in spec.dividing if not cuts_matrices(spec, each)}, key=grid.axes.index)
    )
    blocks = []
    for at, places in grid.groups(between).items():
        rank = dict(zip(between, at, strict=True))
        only_here = all(
            each.index is None or each.index == rank.get(each.axis, 0) for each in spec.placements
        )
        box = block_box(spec, rank)
        if only_here and all(box[1]):
            blocks.append(Block(spec, box, places))
    return blocks
