"""Norms, zero counts and the found-inf flag of one step over all parts and ranks, read by the host once."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from attrs import frozen

from megaopt_core.optimizers.grad_stats import count_zeros, sum_of_squares
from megaopt_core.optimizers.part import OptimizerPart
from megaopt_core.parallel.groups import ProcessGroupCollection, size_of

__all__ = ["GradStats", "found_inf_in", "measure", "stats_device"]


@frozen
class GradStats:
    """What one step knows about its gradients.

    Args:
        found_inf: a gradient is not finite on some rank.
        norms: norm group to L2 norm; None is the main one. Empty when norms were not asked for.
        zeros: number of zero elements; None when it was not asked for.
    """

    found_inf: bool
    norms: Mapping[str | None, float]
    zeros: int | None


def stats_device(parts: Sequence[OptimizerPart]) -> torch.device:
    """Return the device that statistics are gathered on: the parameters', or what the backend needs.

    Args:
        parts: the optimizer's parts.
    """
    for part in parts:
        for tensor in part.stepped:
            return tensor.device
    if dist.is_available() and dist.is_initialized() and "nccl" in str(dist.get_backend()):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _reduce_max(flag: torch.Tensor, pgs: ProcessGroupCollection) -> None:
    for group in (pgs.mp, pgs.dense_dp):
        if size_of(group) > 1:
            dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=group)


def found_inf_in(grads: Sequence[torch.Tensor], inv_scale: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Multiply gradients by `inv_scale` in place and return a flag that is above 0 when one is not finite.

    Args:
        grads: gradients, of any devices and dtypes.
        inv_scale: one element, fp32.
        device: where the flag lives.
    """
    flag = torch.zeros(1, dtype=torch.float32, device=device)
    by_kind: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for grad in grads:
        by_kind.setdefault((grad.device, grad.dtype), []).append(grad)
    for (where, _), some in by_kind.items():
        local = torch.zeros(1, dtype=torch.float32, device=where)
        torch._amp_foreach_non_finite_check_and_unscale_(some, local, inv_scale.to(where))
        flag = torch.maximum(flag, local.to(device))
    return flag


def measure(
    parts: Sequence[OptimizerPart],
    pgs: ProcessGroupCollection,
    norm_groups: Sequence[str],
    *,
    norms: bool,
    zeros: bool,
    found_inf: torch.Tensor | None = None,
    check_finite: bool = False,
) -> GradStats:
    """Return norms, zeros and the found-inf flag over all parts and ranks.

    Every rank must call it, with the same arguments; ranks without parameters too.

    Args:
        parts: the optimizer's parts.
        pgs: the process groups.
        norm_groups: names of the separate norms, the same on every rank.
        norms: compute norms.
        zeros: count zeros.
        found_inf: a flag that unscaling has already made on this rank.
        check_finite: derive the flag from the norm.
    """
    if not (norms or zeros or check_finite) and found_inf is None:
        return GradStats(found_inf=False, norms={}, zeros=None)
    device = stats_device(parts)
    keys: list[str | None] = [None, *norm_groups]
    totals: torch.Tensor | None = None
    if norms or zeros or check_finite:
        totals = torch.zeros(len(keys) + 1, dtype=torch.float64, device=device)
        for group, members in _by_stats_group(parts).items():
            sums = _local_sums(members, keys, device, norms=norms or check_finite, zeros=zeros)
            if size_of(group) > 1:
                dist.all_reduce(sums, group=group)
            totals += sums
    flag = torch.zeros(1, dtype=torch.float32, device=device) if found_inf is None else found_inf.to(device)
    if check_finite and totals is not None:
        flag = torch.maximum(flag, (~torch.isfinite(totals[:-1].sum())).float().reshape(1))
    if found_inf is not None or check_finite:
        _reduce_max(flag, pgs)
    host = torch.cat([flag.double(), totals if totals is not None else flag.new_zeros(0).double()]).tolist()
    found = host[0] > 0
    squares = host[1 : 1 + len(keys)] if norms else []
    return GradStats(
        found_inf=found,
        norms={key: math.sqrt(square) for key, square in zip(keys, squares, strict=False)},
        zeros=int(host[-1]) if zeros and not found else None,
    )


def _by_stats_group(parts: Sequence[OptimizerPart]) -> dict[dist.ProcessGroup | None, list[OptimizerPart]]:
    grouped: dict[dist.ProcessGroup | None, list[OptimizerPart]] = {}
    for part in parts:
        grouped.setdefault(part.sharded.stats_group, []).append(part)
    return grouped


def _local_sums(
    parts: Sequence[OptimizerPart], keys: Sequence[str | None], device: torch.device, *, norms: bool, zeros: bool
) -> torch.Tensor:
    grads: dict[str | None, list[torch.Tensor]] = {key: [] for key in keys}
    for part in parts:
        for group, grad in part.counted_grads():
            grads[group].append(grad)
    blank = torch.zeros((), dtype=torch.float64, device=device)
    sums = [sum_of_squares(grads[key], device) if norms else blank for key in keys]
    everything = [grad for some in grads.values() for grad in some]
    sums.append(count_zeros(everything, device) if zeros else blank)
    return torch.stack(sums)
