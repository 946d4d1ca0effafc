"""The work that parameters make for the ranks that share them out."""

from __future__ import annotations

from attrs import evolve

from megaopt_core.params import ParamSpec, RankCoordinates
from megaopt_layerwise.planner import Work, work_of
from megaopt_layerwise.units import cutting, unit_box

__all__ = ["local_work", "work_at"]


def local_work(spec: ParamSpec) -> Work:
    """Return the work of a parameter that its ranks hold whole.

    A batch goes apart along its first dimension, and only if its optimizer takes parts of tensors: its state then has
    an element for each element, so that any other world can load it.

    Args:
        spec: the parameter, as the ranks hold it.

    Example:
        >>> import torch
        >>> from megaopt_core.params import Granularity, MatrixView
        >>> spec = ParamSpec("experts", (8, 2, 4, 4), torch.float32, torch.float32, "muon", 0, Granularity.TENSOR, 9.0,
        ...     view=MatrixView(batch_dims=2), takes_peers=True)
        >>> local_work(spec).matrices
        8
    """
    work = work_of(spec)
    divides = work.matrices > 1 and spec.takes_peers
    return evolve(work, matrices=spec.shape[0] if divides else 1)


def work_at(spec: ParamSpec, rank: RankCoordinates) -> Work:
    """Return the work that a matrix makes for each of the ranks that share it out at one place along the data axis.

    What another axis cuts has one owner among the ranks along that axis, so that each of these has a share of the work.

    Args:
        spec: the parameter.
        rank: coordinates of one of the ranks.
    """
    unit = evolve(spec, shape=unit_box(spec, rank)[1], placements=())
    axis = cutting(spec)
    share = (unit.numel / spec.numel if spec.numel else 1.0) / (1 if axis is None else axis.size)
    work = evolve(local_work(unit), cost=spec.cost * share)
    if axis is None:
        return work
    return evolve(work, state_bytes=work.state_bytes / axis.size, matrices=1, most_peers=1)
