"""Orthogonalizing the updates of many parameters: equal shapes together, cut matrices with their other ranks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, Final

import torch

from megaopt_muon.methods import MethodBook, is_narrow
from megaopt_muon.newton_schulz import SMALLEST_ALONE, NewtonSchulz, is_tall, normalized
from megaopt_muon.plans import MatrixPlan
from megaopt_muon.precision import compute_dtype, matmul_precision
from megaopt_muon.tensor_parallel import (
    all_gather,
    orthogonalize_distributed,
    orthogonalize_duplicated,
    own_part,
)
from megaopt_muon.whole import Scaled

__all__ = ["Orthogonalized", "batch_limit", "is_single", "merged", "orthogonalize_pieces", "scales_of"]


_BATCH: Final = 1 << 20
"""Elements of 16 bits that are worth iterating together on a processor."""

_GRANULE: Final = 64
"""Small matrices are padded to multiples of it: fewer shapes, for which a kernel is compiled each."""

type Orthogonalized = tuple[int, int, Scaled]
"""Index of the plan, index of the piece, and its orthogonalized matrix (or batch), valid until the next is made."""


def batch_limit(rows: int, columns: int, device: torch.device) -> int:
    """Return how many matrices of one shape are worth iterating together.

    On a CPU batching saves calls, which counts for small matrices only; on an accelerator it also fills the device, and
    is limited by memory alone. The result of a matrix does not depend on which others are in its batch.

    Args:
        rows: of each matrix.
        columns: of each matrix.
        device: where they are.
    """
    if device.type == "cpu" and min(rows, columns) >= SMALLEST_ALONE:
        return 1
    budget = 1 << (18 if device.type == "cpu" else 26)
    return max(1, budget // max(1, rows * columns))


def is_single(ns: NewtonSchulz, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether a matrix is iterated in 16 bits on a processor, by itself.

    Args:
        ns: how to orthogonalize.
        shape: of the matrix.
        dtype: of the update.
        device: where it is.
    """
    narrow = is_narrow(compute_dtype(ns.precision, dtype, device), device)
    return narrow and len(shape) == 2 and batch_limit(shape[0], shape[1], device) == 1


def orthogonalize_pieces(
    ns: NewtonSchulz,
    plans: Sequence[MatrixPlan],
    updates: Sequence[torch.Tensor],
    book: MethodBook | None = None,
    squares: Sequence[float | None] = (),
) -> Iterator[Orthogonalized]:
    """Orthogonalize every matrix of every update.

    Args:
        ns: how to orthogonalize.
        plans: what each parameter consists of; none of them gathers first.
        updates: one per plan, of the parameter's stored shape.
        book: the methods to take; None: those of `ns`.
        squares: squared norms, as far as known, of updates that may be overwritten; by default none.

    Yields:
        `(index of the plan, index of the piece, orthogonalized [*batch, rows, columns])`, without the plan's scale. The
        tensor is valid until the next is asked for.
    """
    batches: dict[tuple[Any, ...], list[tuple[int, int]]] = {}
    cut: list[tuple[int, int]] = []
    for index, plan in enumerate(plans):
        for number, piece in enumerate(plan.pieces):
            if plan.cut is not None and plan.cut.mode != "whole":
                cut.append((index, number))
            else:
                key = _batch_key(ns, piece.shape, updates[index])
                batches.setdefault(key, []).append((index, number))
    with matmul_precision(ns.precision):
        for (kind, *_), members in batches.items():
            if kind == "single":
                for index, number in members:
                    matrix = plans[index].pieces[number].read(updates[index])
                    square = squares[index] if squares else None
                    whole = len(plans[index].pieces) == 1
                    scaled = ns.scaled(
                        matrix, book, consume=square is not None, square=square if whole else None
                    )
                    yield index, number, scaled
            else:
                run = _padded if kind == "padded" else _batched
                yield from run(ns, plans, updates, members)
    for index, number in cut:
        plan, piece = plans[index], plans[index].pieces[number]
        assert plan.cut is not None  # noqa: S101 - selected above
        part = piece.read(updates[index])
        flat = part.reshape(-1, *piece.shape[-2:]) if part.dim() > 3 else part
        if plan.cut.mode == "distributed":
            o = orthogonalize_distributed(ns, flat, plan.cut.group, plan.cut.dim)
        else:
            o = orthogonalize_duplicated(ns, flat, plan.cut.group, plan.cut.dim, book)
        yield index, number, Scaled(o.view(piece.shape))


def _batch_key(ns: NewtonSchulz, shape: tuple[int, ...], update: torch.Tensor) -> tuple[Any, ...]:
    """Return how a matrix is iterated, and what it must share with those of its batch."""
    if is_single(ns, shape, update.dtype, update.device):
        return "single", shape
    if is_narrow(compute_dtype(ns.precision, update.dtype, update.device), update.device):
        return "padded", _padded_shape(shape), shape[:-2]
    return "batch", shape, update.device.index or 0, update.dtype


def _padded_shape(shape: tuple[int, ...]) -> tuple[int, int]:
    small, large = (-(-length // _GRANULE) * _GRANULE for length in sorted(shape[-2:]))
    return small, large


def _padded(
    ns: NewtonSchulz,
    plans: Sequence[MatrixPlan],
    updates: Sequence[torch.Tensor],
    members: Sequence[tuple[int, int]],
) -> Iterator[Orthogonalized]:
    """Orthogonalize matrices of 16 bits on a processor, whose padded shapes are equal; zeros change nothing."""
    shape = plans[members[0][0]].pieces[members[0][1]].shape
    padded = _padded_shape(shape)
    inner = math.prod(shape[:-2])  # matrices in one member: experts
    step = max(1, _BATCH // max(1, inner * math.prod(padded)))
    dtype, device = compute_dtype(ns.precision, updates[0].dtype, updates[0].device), updates[0].device
    for start in range(0, len(members), step):
        chunk = members[start : start + step]
        batch = ns.workspace.take("batch", (len(chunk), inner, *padded), dtype, device, dense=True).zero_()
        slots, sources = [], []
        for slot, (index, number) in zip(batch, chunk, strict=True):
            matrices = plans[index].pieces[number].read(updates[index])
            matrices = matrices.reshape(-1, *matrices.shape[-2:]) if matrices.dim() > 2 else matrices
            tall = matrices.shape[-2] > matrices.shape[-1]
            turned = matrices.mT if tall else matrices
            inside = (slot if matrices.dim() > 2 else slot[0])[..., : turned.shape[-2], : turned.shape[-1]]
            normalized(turned, inside, ns.eps)
            slots.append((tall, turned.shape))
            sources.append(matrices)
        result = ns.batch(batch.view(-1, *padded))
        values = result.values.view(batch.shape)
        for (index, number), (tall, inside_shape), value, source in zip(
            chunk, slots, values, sources, strict=True
        ):
            o = (value if source.dim() > 2 else value[0])[..., : inside_shape[-2], : inside_shape[-1]]
            finite = ns.finite(Scaled(o.mT if tall else o, result.scale), source)
            piece = plans[index].pieces[number]
            yield index, number, Scaled(finite.values.reshape(piece.shape), finite.scale)


def _batched(
    ns: NewtonSchulz,
    plans: Sequence[MatrixPlan],
    updates: Sequence[torch.Tensor],
    members: Sequence[tuple[int, int]],
) -> Iterator[Orthogonalized]:
    """Orthogonalize whole matrices of one shape."""
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
        for slot, source in zip(batch, sources, strict=True):
            normalized(source, slot, ns.eps)
        flat = batch.view(-1, rows, columns)
        if limit > 1:
            # Also a single one goes as a batch: what it becomes must not depend on how many there are.
            result = ns.iterate(flat, tall=is_tall(flat))
        elif len(flat) == 1:
            result = ns.iterate(flat[0], tall=is_tall(flat))
        else:
            for matrix in flat:
                matrix.copy_(ns.iterate(matrix, tall=is_tall(flat)))
            result = flat
        for (index, number), o, source in zip(chunk, result.view(batch.shape), sources, strict=True):
            yield index, number, ns.finite(Scaled(o), source)


def merged(
    ns: NewtonSchulz,
    plan: MatrixPlan,
    update: torch.Tensor,
    book: MethodBook | None = None,
) -> torch.Tensor:
    """Return one parameter's orthogonalized update, unscaled, as a new tensor of its stored shape.

    Args:
        ns: how to orthogonalize.
        plan: what the parameter consists of.
        update: of the parameter's stored shape.
        book: the methods to take; None: those of `ns`.
    """
    source = update
    if plan.gather_first:
        assert plan.cut is not None  # noqa: S101 - gathering needs a cut
        source = all_gather(update, plan.cut.group, plan.cut.stored_dim)
    local = plan if not plan.gather_first else _without_cut(plan)
    out = torch.empty(
        source.shape, dtype=torch.promote_types(update.dtype, torch.float32), device=update.device
    )
    for _, number, o in orthogonalize_pieces(ns, [local], [source], book):
        window = plan.pieces[number].window(out)
        window.copy_(plan.pieces[number].fold(o.values))
        if o.scale != 1.0:
            window.mul_(o.scale)
    if plan.gather_first and plan.cut is not None:
        return own_part(out, plan.cut.group, plan.cut.stored_dim)
    return out


def scales_of(plan: MatrixPlan, device: torch.device) -> float | torch.Tensor:
    """Return the scale of one parameter's update: a number, or a tensor that broadcasts to its stored shape.

    Args:
        plan: what the parameter consists of.
        device: where the tensor is made.
    """
    if len(set(plan.scales)) == 1:
        return plan.scales[0]
    dim = plan.pieces[0].dim
    assert dim is not None  # noqa: S101 - several scales mean several pieces
    lengths = [1] * len(plan.shape)
    lengths[dim] = plan.pieces[0].groups * plan.pieces[0].total
    scales = torch.empty(lengths, device=device)
    for piece, scale in zip(plan.pieces, plan.scales, strict=True):
        piece.window(scales).fill_(scale)
    if plan.gather_first and plan.cut is not None:
        return own_part(scales, plan.cut.group, plan.cut.stored_dim)
    return scales


def _without_cut(plan: MatrixPlan) -> MatrixPlan:
    return MatrixPlan(plan.shape, plan.view, plan.pieces, plan.scales)
