"""Norms, zero counts and the found-inf flag of one step over all parts and ranks, read by the host once."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from attrs import frozen

from megaopt_core.optimizers._between_steps.writes import ForeignWrites
from megaopt_core.optimizers._gradients.double_clipping import DoubleClippingWatch
from megaopt_core.optimizers._gradients.statistics import (
    count_zeros,
    is_read_freely,
    sum_of_squares,
    wide_dtype,
)
from megaopt_core.optimizers._gradients.unread import UnreadStats
from megaopt_core.optimizers._part import OptimizerPart
from megaopt_core.parallel._groups import ProcessGroupCollection, size_of
from megaopt_core.parallel._reduction import all_reduce

__all__ = ["Asked", "GradStats", "found_inf_in", "measure", "measure_unread", "stats_device", "zeros_of"]


@frozen
class GradStats:
    """What one step knows about its gradients.

    Args:
        found_inf: a gradient is not finite on some rank.
        norms: norm group to L2 norm; None is the main one. Empty when norms were not asked for.
        zeros: number of zero elements; None when it was not asked for.
        refused: a rank that meets this one here cannot step what trains.
        written: somebody wrote to the model since the last step on some rank; the same on all ranks.
    """

    found_inf: bool
    norms: Mapping[str | None, float]
    zeros: int | None
    refused: bool = False
    written: bool = False


type _PerGroup = Mapping[dist.ProcessGroup | None, torch.Tensor]


@frozen(eq=False)
class Asked:
    """What a step wants to know, and what this rank knows already; ranks ask for the same.

    Args:
        norms: compute norms.
        zeros: what :func:`zeros_of` returned; None: zeros are not asked for.
        finite: find out whether gradients are finite, where nothing has unscaled them; the sums of squares say so.
        found_inf: a flag that unscaling has already made on this rank; None on every rank, or on none.
        norm_groups: names of the separate norms.
        refused: this rank cannot step what trains; the ranks that it meets are told.
        refusals: let the ranks that share parameters out hear of one that cannot step, whatever else is asked.
        writes: let all ranks hear of one whose model somebody else wrote to, where all meet anyway.
        brought: let the ranks that bring values to pieces together hear of one whose model somebody wrote to.
    """

    norms: bool = False
    zeros: _PerGroup | None = None
    finite: bool = False
    found_inf: torch.Tensor | None = None
    norm_groups: tuple[str, ...] = ()
    refused: bool = False
    refusals: bool = False
    writes: bool = False
    brought: bool = False

    @property
    def meets(self) -> bool:
        """Whether the ranks that add up statistics have something to tell each other."""
        return self.norms or self.zeros is not None or self.finite or self.refusals or self.brought

    @property
    def everyone_meets(self) -> bool:
        """Whether all ranks hear whether a gradient is not finite on one of them."""
        return self.finite or self.found_inf is not None

    @property
    def keys(self) -> list[str | None]:
        """The norms that are summed up, the main one first."""
        return [None, *self.norm_groups]


def stats_device(parts: Sequence[OptimizerPart]) -> torch.device:
    """Return the device that statistics are gathered on: the parameters', or what the backend needs.

    Args:
        parts: the optimizer's parts.
    """
    for part in parts:
        for piece in part.pieces:
            return (*piece.model_params, piece.param)[0].device
    if dist.is_available() and dist.is_initialized() and "nccl" in str(dist.get_backend()):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def found_inf_in(grads: Sequence[torch.Tensor], inv_scale: float, device: torch.device) -> torch.Tensor:
    """Multiply gradients by `inv_scale` in place and return a flag that is above 0 when one is not finite.

    Args:
        grads: gradients, of any devices and dtypes.
        inv_scale: what they are multiplied by.
        device: where the flag lives.
    """
    flag = torch.zeros(1, dtype=torch.float32, device=device)
    by_kind: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for grad in map(_as_real, grads):
        by_kind.setdefault((grad.device, grad.dtype), []).append(grad)
    for (where, _), some in by_kind.items():
        local = torch.zeros(1, dtype=torch.float32, device=where)
        factor = torch.full((1,), inv_scale, dtype=torch.float32, device=where)
        torch._amp_foreach_non_finite_check_and_unscale_(some, local, factor)
        flag = torch.maximum(flag, local.to(device))
    return flag


def _as_real(grad: torch.Tensor) -> torch.Tensor:
    """Return the numbers in a gradient's memory: a complex one has two for each element."""
    if not grad.is_complex():
        return grad
    return torch.view_as_real(grad.conj() if grad.is_conj() else grad)


def _by_stats_group(parts: Sequence[OptimizerPart]) -> dict[dist.ProcessGroup | None, list[OptimizerPart]]:
    grouped: dict[dist.ProcessGroup | None, list[OptimizerPart]] = {}
    for part in parts:
        grouped.setdefault(part.sharded.stats_group, []).append(part)
    return grouped


def zeros_of(parts: Sequence[OptimizerPart]) -> _PerGroup:
    """Return this rank's zero counts, per group that they will be added over.

    Args:
        parts: the optimizer's parts.
    """
    device = stats_device(parts)
    return {
        group: count_zeros((grad for part in members for _, grad in part.counted_grads()), device)
        for group, members in _by_stats_group(parts).items()
    }


def measure(parts: Sequence[OptimizerPart], pgs: ProcessGroupCollection, asked: Asked) -> GradStats:
    """Return norms, zeros and the found-inf flag over all parts and ranks.

    Every rank must call it, asking for the same; ranks without parameters too.

    Args:
        parts: the optimizer's parts.
        pgs: the process groups.
        asked: what is wanted.
    """
    if not (asked.meets or asked.everyone_meets):
        return GradStats(found_inf=False, norms={}, zeros=None, refused=asked.refused)
    # Where a sum is not read before ranks add it up, they hear of one that overflows together, or it must not.
    exact = not asked.everyone_meets and not is_read_freely(stats_device(parts))
    stats, overflown = _measure(parts, pgs, asked, exact_range=exact)
    if overflown and (asked.found_inf is None or not stats.found_inf):
        # Squares may overflow where gradients do not; in steps that would be skipped, and in rare others.
        stats, _ = _measure(parts, pgs, asked, exact_range=True)
    return stats


def measure_unread(
    parts: Sequence[OptimizerPart], asked: Asked, watch: DoubleClippingWatch, clip_grad: float
) -> tuple[UnreadStats, dict[str | None, torch.Tensor]]:
    """Return norms and zeros that the host has not read, and the factor that clips each norm group, on the device.

    Every sum is added in float64, since nobody would see that squares have overflowed.

    Args:
        parts: the optimizer's parts.
        asked: norms, zeros, or neither; nothing that the step depends on.
        watch: is told of the norm once the host has it.
        clip_grad: the largest norm that is left as it is; 0: nothing is clipped.
    """
    device, keys = stats_device(parts), asked.keys
    nothing = torch.zeros((), dtype=wide_dtype(device), device=device)
    totals, _ = _totals(parts, asked, nothing, exact_range=True)
    factors: dict[str | None, torch.Tensor] = {}
    if asked.norms and clip_grad > 0.0:
        coefficients = clip_grad / (totals[: len(keys)].sqrt() + 1.0e-6)
        # As in torch, a norm that is NaN makes every gradient NaN: `clamp` keeps it.
        factors = dict(zip(keys, coefficients.clamp(max=1.0).unbind(), strict=True))
    # Where a counter tells of a write, the step reads who has written and takes it over.
    flags = {writes: flag for writes, flag in _flags(parts).items() if not writes.is_counted}
    shown = keys if asked.norms else []
    values = torch.cat([totals[: len(shown)], totals[-3:-2], *(flag.to(totals) for flag in flags.values())])
    return UnreadStats(shown, values, list(flags), watch, clip_grad, asked.zeros is not None), factors


type _Brought = dict[tuple[OptimizerPart, ...], torch.Tensor]
"""Parts whose pieces get values from all ranks together, and whether somebody wrote such values on one of these."""


def _totals(
    parts: Sequence[OptimizerPart], asked: Asked, written: torch.Tensor, *, exact_range: bool
) -> tuple[torch.Tensor, _Brought]:
    """Return a sum for each key, then the zeros, then how many ranks refuse, then on how many somebody wrote."""
    brought: _Brought = {}
    totals = written.new_zeros(len(asked.keys) + 3)
    if not asked.meets:
        return totals, brought
    for group, members in _by_stats_group(parts).items():
        together = tuple(part for part in members if part.writes.is_together)
        sums = torch.stack(
            [
                *_sums_of_squares(members, asked, written.device, exact_range=exact_range),
                written.new_zeros(()) if asked.zeros is None else asked.zeros[group],
                written.new_full((), float(asked.refused)),
                written,
                _any_of(_wrote_together(together, written), written),
            ]
        )
        if size_of(group) > 1:
            all_reduce(sums, group, "the reduction of gradient norms")
        if together:
            brought[together] = sums[-1:]
        totals += sums[:-1]
    return totals, brought


def _measure(
    parts: Sequence[OptimizerPart], pgs: ProcessGroupCollection, asked: Asked, *, exact_range: bool
) -> tuple[GradStats, bool]:
    """Return the statistics, and whether a sum of squares is not finite on some rank; False where nobody asked."""
    device = stats_device(parts)
    written = torch.zeros((), dtype=wide_dtype(device), device=device)
    if asked.writes:
        written = _written(parts, written)
    totals, brought = _totals(parts, asked, written, exact_range=exact_range)
    everything = totals[:-3].sum()
    if asked.finite:
        everything = everything + _uncounted_squares(parts, device, exact_range=exact_range)
    flags = totals.new_tensor([0.0, 0.0, float(asked.refused), 0.0])
    if asked.everyone_meets:
        flags[3] = written
        flags[0] = ~torch.isfinite(everything)
        flags[1] = flags[0] if asked.found_inf is None else asked.found_inf.to(flags).squeeze()
        for group in (pgs.mp, pgs.dense_dp):
            if size_of(group) > 1:
                all_reduce(flags, group, "the exchange of found_inf", dist.ReduceOp.MAX)
    host = _read_with_writes(torch.cat([*brought.values(), flags, totals]), parts)
    for together in brought:
        is_brought = host.pop(0) > 0
        for part in together:
            part.writes.is_brought = is_brought
    overflown, found, someone_refuses, was_written, *squares, zeros, refusals, writes = host
    stats = GradStats(
        found_inf=found > 0,
        norms=dict(zip(asked.keys, map(math.sqrt, squares), strict=True)) if asked.norms else {},
        zeros=None if asked.zeros is None or found > 0 else int(zeros),
        refused=someone_refuses > 0 or refusals > 0,
        # Elsewhere the ranks of one replica meet, which cannot tell the others.
        written=was_written > 0 if asked.everyone_meets else asked.refusals and writes > 0,
    )
    return stats, overflown > 0


def _written(parts: Sequence[OptimizerPart], like: torch.Tensor) -> torch.Tensor:
    """Return 1 where somebody wrote to the model since the last step on this rank, else 0, without waiting for it."""
    if any(part.writes.is_counted for part in parts):
        return like.new_ones(())
    return _any_of([*_flags(parts).values(), *_wrote_together(parts, like)], like)


def _wrote_together(parts: Sequence[OptimizerPart], like: torch.Tensor) -> list[torch.Tensor]:
    """Return whether somebody wrote to what only all ranks together bring to the pieces of each part."""
    return [part.writes.wrote_together(like) for part in parts if part.writes.is_together]


def _any_of(flags: Sequence[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
    """Return 1 where one of some flags is set, else 0."""
    return torch.cat([flag.to(like) for flag in flags]).amax() if flags else like.new_zeros(())


def _flags(parts: Sequence[OptimizerPart]) -> dict[ForeignWrites, torch.Tensor]:
    """Return what watches for foreign writes on the device, with its answer of one element."""
    flags = {part.writes: part.writes.flag for part in parts}
    return {writes: flag.view(1) for writes, flag in flags.items() if flag is not None}


def _read_with_writes(values: torch.Tensor, parts: Sequence[OptimizerPart]) -> list[float]:
    """Return values on the host, and tell the parts what they ask of the device by the same read."""
    flags = _flags(parts)
    host: list[float] = torch.cat([values, *(flag.to(values) for flag in flags.values())]).tolist()
    for writes, flag in zip(flags, host[len(values) :], strict=True):
        writes.is_told = flag > 0
    return host[: len(values)]


def _sums_of_squares(
    parts: Sequence[OptimizerPart], asked: Asked, device: torch.device, *, exact_range: bool
) -> list[torch.Tensor]:
    """Return one sum of squares for each key."""
    grads: dict[str | None, list[torch.Tensor]] = {key: [] for key in asked.keys}
    if asked.norms or asked.finite:
        for part in parts:
            for group, grad in part.counted_grads():
                grads[group].append(grad)
    return [sum_of_squares(some, device, exact_range=exact_range) for some in grads.values()]


def _uncounted_squares(
    parts: Sequence[OptimizerPart], device: torch.device, *, exact_range: bool
) -> torch.Tensor:
    """Return the sum of squares of gradients that another rank counts: stepped here, they must be finite here."""
    grads = [grad for part in parts for grad in part.uncounted_grads()]
    return sum_of_squares(grads, device, exact_range=exact_range)
