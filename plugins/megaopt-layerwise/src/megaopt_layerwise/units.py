"""What of a parameter one owner steps: all of it, or the experts of a batch that one expert-parallel rank has."""

from __future__ import annotations

from megaopt_core.params import AxisPlacement, Box, ParamSpec, RankCoordinates, whole

__all__ = ["cutting", "cutting_axes", "unit_box"]


def _separates(placement: AxisPlacement, spec: ParamSpec) -> bool:
    """Return whether an axis only tells matrices apart: one rank has all of one, or each has some of a batch."""
    batch_dims = 0 if spec.view is None else spec.view.batch_dims
    return placement.dim is None or placement.dim < batch_dims


def cutting(spec: ParamSpec) -> AxisPlacement | None:
    """Return how the ranks of an axis cut through matrices, so that each has a part of all; None: they are whole.

    Args:
        spec: the parameter.
    """
    return next((each for each in spec.dividing if not _separates(each, spec)), None)


def cutting_axes(spec: ParamSpec) -> tuple[str, ...]:
    """Return the axes whose ranks cut through matrices.

    Args:
        spec: the parameter.
    """
    return tuple(each.axis for each in spec.dividing if not _separates(each, spec))


def unit_box(spec: ParamSpec, rank: RankCoordinates) -> Box:
    """Return the part of a logical tensor that has one owner among the ranks that hold pieces of it.

    Args:
        spec: the parameter.
        rank: the coordinates of one of these ranks.

    Example:
        >>> import torch
        >>> from megaopt_core.params import Granularity, MatrixView
        >>> experts = ParamSpec(
        ...     "experts", (8, 4, 2), torch.float32, torch.float32, "muon", 0, Granularity.TENSOR, 1.0,
        ...     view=MatrixView(batch_dims=1),
        ...     placements=(AxisPlacement("ep", 4, dim=0), AxisPlacement("expert_tp", 2, dim=1)),
        ... )
        >>> unit_box(experts, {"ep": 1, "expert_tp": 1})
        ((2, 0, 0), (2, 4, 2))
    """
    box = whole(spec.shape)
    for placement in spec.placements:
        if _separates(placement, spec):
            box = placement.part(box, rank.get(placement.axis, 0))
    return box
