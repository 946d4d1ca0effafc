"""One matrix that the ranks of an axis cut: its parts, and where they lie in the whole."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from attrs import frozen

from megaopt_core.params import AxisPlacement, Box, ParamSpec, Shard
from megaopt_core.sharding import LiveModel
from megaopt_layerwise.units import unit_box

__all__ = ["CutTensor", "in_halves"]


@frozen
class CutTensor:
    """One matrix of which this rank holds a part.

    Args:
        spec: the parameter.
        unit: what its owner steps.
        parts: what each rank along the axis holds of it.
        owner: place of the owner along the axis.
    """

    spec: ParamSpec
    unit: Box
    parts: tuple[Shard, ...]
    owner: int

    @classmethod
    def of(cls, spec: ParamSpec, axis: AxisPlacement, owner: int, model: LiveModel) -> CutTensor:
        """Return one of a live model.

        Args:
            spec: the parameter.
            axis: how the ranks cut it.
            owner: place of the owner along the axis.
            model: tells where this rank stands.
        """
        parts = tuple(spec.shard({**model.rank, axis.axis: place}) for place in range(axis.size))
        return cls(spec, unit_box(spec, model.rank), parts, owner)

    def inside(self, whole: torch.Tensor, part: Shard) -> torch.Tensor:
        """Return a part of what the owner has, as a view.

        Args:
            whole: what the owner has.
            part: one of `parts`.
        """
        view = whole.view(self.unit[1])
        for dim, (offset, size) in enumerate(zip(*part.box, strict=True)):
            view = view.narrow(dim, offset - self.unit[0][dim] if size else 0, size)
        return view

    def joined(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the whole that an owner steps.

        Args:
            parts: what the ranks along the axis hold of it, each flat.
        """
        whole = torch.empty(self.unit[1], dtype=parts[0].dtype, device=parts[0].device)
        for part, values in zip(self.parts, parts, strict=True):
            target = self.inside(whole, part)
            target.copy_(values.view(target.shape))
        return whole


def in_halves(tensors: Sequence[CutTensor]) -> tuple[list[CutTensor], list[CutTensor]]:
    """Return tensors in two halves, in each of which every owner has about half of its work; the same on all ranks.

    Args:
        tensors: of all owners along one axis.
    """
    due: dict[int, float] = {}
    for tensor in tensors:
        due[tensor.owner] = due.get(tensor.owner, 0.0) + tensor.spec.cost
    halves: tuple[list[CutTensor], list[CutTensor]] = ([], [])
    taken = dict.fromkeys(due, 0.0)
    for tensor in tensors:
        # By where its middle lies: a single matrix goes with the second half, so that the first one is never all.
        is_later = taken[tensor.owner] + tensor.spec.cost / 2 >= due[tensor.owner] / 2
        halves[is_later].append(tensor)
        taken[tensor.owner] += tensor.spec.cost
    return halves
