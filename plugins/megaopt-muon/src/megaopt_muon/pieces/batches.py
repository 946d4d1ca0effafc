"""Matrices that are iterated together: which, how many at a time, and padded to what."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any, Final

import torch

from megaopt_muon.choice.growth import are_tame
from megaopt_muon.choice.methods import MethodBook, is_narrow
from megaopt_muon.newton_schulz.iteration import NewtonSchulz
from megaopt_muon.newton_schulz.norms import (
    SMALLEST_ALONE,
    all_normalized,
    are_worth_it_alone,
    each_normalized,
)
from megaopt_muon.newton_schulz.scaled import Scaled
from megaopt_muon.pieces.half_batches import MOST
from megaopt_muon.pieces.plans import MatrixPlan
from megaopt_muon.products.precision import compute_dtype
from megaopt_muon.products.symmetric import is_tall

__all__ = ["Orthogonalized", "batch_key", "batch_limit", "batched", "is_single", "is_swept", "padded"]

_BATCH: Final = 1 << 20
"""Elements of 16 bits that are worth iterating together on a processor."""

_SMALL_BATCH: Final = 1 << 17
"""Elements of 32 or 64 bits that are, of matrices below 256 rows or columns."""

_WIDE_BATCH: Final = 1 << 18
"""The same of larger ones, of which block rows are multiplied: more calls."""

_LONG: Final = 1.5
"""Aspect from which on larger matrices go one by one: runs of steps depend on the singular values of each."""

_NARROW_ALONE: Final = 1 << 17
"""Elements from which on a matrix of 16 bits is iterated by itself, however few rows it has."""

_GRANULE: Final = 64
"""Small matrices are padded to multiples of it: fewer shapes, for which a kernel is compiled each."""

type Orthogonalized = tuple[int, int, Scaled]
"""Index of the plan, index of the piece, and its orthogonalized matrix (or batch), valid until the next is made."""


def batch_limit(rows: int, columns: int, device: torch.device) -> int:
    """Return how many matrices of one shape, of 32 or 64 bits on a processor, are worth iterating together.

    On a CPU batching saves calls, which counts for small matrices only; on an accelerator it also fills the device, and
    is limited by memory alone. On a CPU the result of a matrix does not depend on which others are in its batch; on an
    accelerator, whose library takes other kernels for other batches, it does within rounding.

    Args:
        rows: of each matrix.
        columns: of each matrix.
        device: where they are.
    """
    if device.type != "cpu":
        budget = MOST
    elif min(rows, columns) < SMALLEST_ALONE:
        budget = _SMALL_BATCH
    elif max(rows, columns) < _LONG * min(rows, columns):
        budget = _WIDE_BATCH
    else:
        return 1
    return max(1, budget // max(1, rows * columns))


def is_single(ns: NewtonSchulz, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether a matrix is iterated in 16 bits on a processor, by itself.

    Args:
        ns: how to orthogonalize.
        shape: of the matrix.
        dtype: of the update.
        device: where it is.
    """
    return _is_alone(shape) and is_narrow(compute_dtype(ns.precision, dtype, device), device)


@lru_cache(maxsize=4096)
def _is_alone(shape: tuple[int, ...]) -> bool:
    """Return whether a matrix of 16 bits is iterated by itself."""
    return len(shape) == 2 and (math.prod(shape) > _NARROW_ALONE or are_worth_it_alone(*shape))


def is_swept(ns: NewtonSchulz, plan: MatrixPlan, param: torch.Tensor, grad: torch.Tensor) -> bool:
    """Return whether an update can be written in 16 bits while it is made: its matrices are iterated so, one by one.

    Args:
        ns: how to orthogonalize.
        plan: what the parameter consists of.
        param: the parameter.
        grad: its gradient.
    """
    dense = param.dtype is torch.float32 and param.is_contiguous() and grad.is_contiguous()
    alone = (is_single(ns, piece.shape, param.dtype, param.device) for piece in plan.pieces)
    return dense and plan.cut is None and all(alone)


def batch_key(shape: tuple[int, ...], update: torch.Tensor, *, narrow: bool) -> tuple[Any, ...]:
    """Return how a matrix is iterated, and what it must share with those of its batch.

    Args:
        shape: of the matrix.
        update: that it lies in.
        narrow: it is iterated in 16 bits on a processor.
    """
    if not narrow:
        return "batch", shape, update.device, update.dtype
    if _is_alone(shape):
        return "single", shape
    return "padded", _padded_shape(shape), shape[:-2]


@lru_cache(maxsize=4096)
def _padded_shape(shape: tuple[int, ...]) -> tuple[int, int]:
    rows, columns = (-(-length // _GRANULE) * _GRANULE for length in shape[-2:])
    return rows, columns


def padded(
    ns: NewtonSchulz,
    plans: Sequence[MatrixPlan],
    updates: Sequence[torch.Tensor],
    members: Sequence[tuple[int, int]],
    book: MethodBook | None = None,
) -> Iterator[Orthogonalized]:
    """Orthogonalize matrices of 16 bits on a processor, whose padded shapes are equal; zeros change nothing.

    Args:
        ns: how to orthogonalize.
        plans: what each parameter consists of.
        updates: one per plan.
        members: which matrices: index of the plan, index of the piece.
        book: not read: they go step by step.
    """
    del book
    shape = plans[members[0][0]].pieces[members[0][1]].shape
    filled = _padded_shape(shape)
    inner = math.prod(shape[:-2])  # matrices in one member: experts
    step = max(1, _BATCH // max(1, inner * math.prod(filled)))
    dtype, device = compute_dtype(ns.precision, updates[0].dtype, updates[0].device), updates[0].device
    for start in range(0, len(members), step):
        chunk = members[start : start + step]
        wide, batch = (
            ns.workspace.take("batch", (len(chunk), inner, *filled), each, device, dense=True)
            for each in (torch.float32, dtype)
        )
        sources = [plans[index].pieces[number].read(updates[index]) for index, number in chunk]
        if len(shape) > 3:
            sources = [source.flatten(0, -3) for source in sources]
        if any(source.shape[-2:] != filled for source in sources):
            wide.zero_()
        each_normalized(sources, _places(wide, sources), ns.eps)
        scales = [plans[index].scales[number] for index, number in chunk]
        result = ns.batch(batch.copy_(wide).view(-1, *filled))
        if len(set(scales)) == 1 and are_tame(ns.coefficients):  # else each is looked at before
            wide.copy_(result.values.view(batch.shape)).mul_(result.scale * scales[0])
            result = Scaled(wide)
            scales = [1.0] * len(scales)
        places = _places(result.values.view(batch.shape), sources)
        for (index, number), place, source, scale in zip(chunk, places, sources, scales, strict=True):
            o = ns.finite(Scaled(place, result.scale), source)
            if len(shape) > 3:
                o = Scaled(o.values.unflatten(0, shape[:-2]), o.scale)
            yield index, number, o.times(scale) if scale != 1.0 else o


def _places(batch: torch.Tensor, sources: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return where sources lie in a batch `[sources, matrices, rows, columns]`, whose matrices may be larger."""
    slots = (batch.squeeze(1) if sources[0].dim() == 2 else batch).unbind()
    filled = slots[0].shape
    return [
        slot if source.shape == filled else slot[..., : source.shape[-2], : source.shape[-1]]
        for slot, source in zip(slots, sources, strict=True)
    ]


def batched(
    ns: NewtonSchulz,
    plans: Sequence[MatrixPlan],
    updates: Sequence[torch.Tensor],
    members: Sequence[tuple[int, int]],
    book: MethodBook | None = None,
) -> Iterator[Orthogonalized]:
    """Orthogonalize whole matrices of one shape.

    Args:
        ns: how to orthogonalize.
        plans: what each parameter consists of.
        updates: one per plan.
        members: which matrices: index of the plan, index of the piece.
        book: the methods to take; None: what is cheapest here.
    """
    first = updates[members[0][0]]
    shape = plans[members[0][0]].pieces[members[0][1]].shape
    rows, columns = shape[-2:]
    inner = math.prod(shape[:-2])  # matrices in one member: experts
    limit = batch_limit(rows, columns, first.device)
    step = max(1, limit // inner)
    for start in range(0, len(members), step):
        chunk = members[start : start + step]
        dtype = compute_dtype(ns.precision, first.dtype, first.device)
        batch = ns.workspace.take("update", (len(chunk), *shape), dtype, first.device)
        sources = [plans[index].pieces[number].read(updates[index]) for index, number in chunk]
        all_normalized(sources, batch, ns.eps)
        flat = batch.view(-1, rows, columns)
        if limit > 1:
            # Also a single one goes as a batch: what it becomes must not depend on how many there are.
            result = ns.iterate(flat, tall=is_tall(flat), book=book)
        elif len(flat) == 1:
            result = ns.iterate(flat[0], tall=is_tall(flat), book=book)
        else:
            for matrix in flat:
                matrix.copy_(ns.iterate(matrix, tall=is_tall(flat), book=book))
            result = flat
        for (index, number), o, source in zip(chunk, result.view(batch.shape), sources, strict=True):
            yield index, number, ns.finite(Scaled(o), source, book)
