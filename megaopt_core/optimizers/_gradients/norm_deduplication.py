"""How parameters enter norms and counts: once each, however many ranks hold them."""

from __future__ import annotations

import torch
from attrs import frozen

from megaopt_core.parallel._groups import ProcessGroupCollection, rank_in
from megaopt_core.params._parts import is_marked_expert

__all__ = ["COUNTED", "Counting", "counting_of", "counting_rule"]


@frozen
class Counting:
    """How one parameter enters norms and counts.

    Args:
        counted: False for a duplicate that another rank counts.
        norm_group: name of the norm that it enters; None: the main one.
    """

    counted: bool = True
    norm_group: str | None = None


COUNTED = Counting()
"""The rule of almost every parameter: counted here, in the main norm."""


def counting_rule(
    pgs: ProcessGroupCollection,
    *,
    shared: bool,
    tensor_parallel: bool,
    is_expert: bool,
    norm_group: str | None,
) -> Counting:
    """Return how a parameter is counted on this rank.

    A parameter that tensor parallelism does not cut is the same on all ranks of its group: the first counts it.

    Args:
        pgs: the process groups.
        shared: tied to a parameter of another pipeline stage, which counts it.
        tensor_parallel: cut over the tensor-parallel group.
        is_expert: belongs to an expert, whose tensor-parallel group may be another.
        norm_group: name of the norm that it enters; None: the main one.

    Example:
        >>> counting_rule(
        ...     ProcessGroupCollection(), shared=True, tensor_parallel=False, is_expert=False, norm_group=None
        ... )
        Counting(counted=False, norm_group=None)
    """
    first = rank_in(pgs.tensor_parallel(is_expert=is_expert)) == 0
    return Counting(counted=not shared and (tensor_parallel or first), norm_group=norm_group)


def counting_of(param: torch.Tensor, pgs: ProcessGroupCollection) -> Counting:
    """Return how a parameter is counted, from its attributes alone.

    Args:
        param: may carry `shared`, `tensor_model_parallel`, `allreduce` and `grad_norm_group`.
        pgs: the process groups.
    """
    return counting_rule(
        pgs,
        shared=bool(getattr(param, "shared", False)),
        tensor_parallel=bool(getattr(param, "tensor_model_parallel", False)),
        is_expert=is_marked_expert(param),
        norm_group=getattr(param, "grad_norm_group", None),
    )
