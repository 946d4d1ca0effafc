"""Orthogonalizing the updates of many parameters: equal shapes together, cut matrices with their other ranks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch

from megaopt_muon.newton_schulz import NewtonSchulz, is_tall, normalized
from megaopt_muon.plans import MatrixPlan
from megaopt_muon.precision import compute_dtype, matmul_precision
from megaopt_muon.tensor_parallel import (
    all_gather,
    orthogonalize_distributed,
    orthogonalize_duplicated,
    own_part,
)

__all__ = ["batch_limit", "merged", "orthogonalize_pieces", "scales_of"]


def batch_limit(rows: int, columns: int, device: torch.device) -> int:
    """Return how many matrices of one shape are worth iterating together.

    On a CPU batching saves calls, which counts for small matrices only; on an accelerator it also fills the device, and
    is limited by memory alone. The result of a matrix does not depend on which others are in its batch.

    Args:
        rows: of each matrix.
        columns: of each matrix.
        device: where they are.
    """
    if device.type == "cpu" and min(rows, columns) >= 256:
        return 1
    budget = 1 << (18 if device.type == "cpu" else 26)
    return max(1, budget // max(1, rows * columns))


def orthogonalize_pieces(
    ns: NewtonSchulz, plans: Sequence[MatrixPlan], updates: Sequence[torch.Tensor], mode: str
) -> Iterator[tuple[int, int, torch.Tensor]]:
    """Orthogonalize every matrix of every update.

    Args:
        ns: how to orthogonalize.
        plans: what each parameter consists of; none of them gathers first.
        updates: one per plan, of the parameter's stored shape.
        mode: `"duplicated"` or `"distributed"`, for plans that are cut.

    Yields:
        `(index of the plan, index of the piece, orthogonalized [*batch, rows, columns])`, unscaled. The tensor is valid
        until the next is asked for.
    """
    batches: dict[tuple[int, ...], list[tuple[int, int]]] = {}
    cut: list[tuple[int, int]] = []
    for index, plan in enumerate(plans):
        for number, piece in enumerate(plan.pieces):
            if plan.cut is not None:
                cut.append((index, number))
            else:
                batches.setdefault((*piece.shape, updates[index].device.index or 0), []).append(
                    (index, number)
                )
    for members in batches.values():
        yield from _batched(ns, plans, updates, members)
    for index, number in cut:
        plan, piece = plans[index], plans[index].pieces[number]
        assert plan.cut is not None  # noqa: S101 - selected above
        part = piece.read(updates[index])
        run = orthogonalize_distributed if mode == "distributed" else orthogonalize_duplicated
        flat = run(
            ns, part.reshape(-1, *piece.shape[-2:]) if part.dim() > 3 else part, plan.cut.group, plan.cut.dim
        )
        yield index, number, flat.view(piece.shape)


def _batched(
    ns: NewtonSchulz,
    plans: Sequence[MatrixPlan],
    updates: Sequence[torch.Tensor],
    members: Sequence[tuple[int, int]],
) -> Iterator[tuple[int, int, torch.Tensor]]:
    """Orthogonalize whole matrices of one shape."""
    first = updates[members[0][0]]
    shape = plans[members[0][0]].pieces[members[0][1]].shape
    rows, columns = shape[-2:]
    inner = math.prod(shape[:-2])  # matrices in one member: experts
    limit = batch_limit(rows, columns, first.device)
    step = max(1, limit // inner)
    with matmul_precision(ns.precision):
        for start in range(0, len(members), step):
            chunk = members[start : start + step]
            dtype = compute_dtype(ns.precision, first.dtype, first.device)
            batch = ns.workspace.take("update", (len(chunk), *shape), dtype, first.device)
            for slot, (index, number) in zip(batch, chunk, strict=True):
                normalized(plans[index].pieces[number].read(updates[index]), slot, ns.eps)
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
            yield from (
                (index, number, o) for (index, number), o in zip(chunk, result.view(batch.shape), strict=True)
            )


def merged(ns: NewtonSchulz, plan: MatrixPlan, update: torch.Tensor, mode: str) -> torch.Tensor:
    """Return one parameter's orthogonalized update, unscaled, as a new tensor of its stored shape.

    Args:
        ns: how to orthogonalize.
        plan: what the parameter consists of.
        update: of the parameter's stored shape.
        mode: `"duplicated"` or `"distributed"`, for a plan that is cut.
    """
    source = update
    if plan.gather_first:
        assert plan.cut is not None  # noqa: S101 - gathering needs a cut
        source = all_gather(update, plan.cut.group, plan.cut.stored_dim)
    local = plan if not plan.gather_first else _without_cut(plan)
    out = torch.empty(
        source.shape, dtype=torch.promote_types(update.dtype, torch.float32), device=update.device
    )
    for _, number, o in orthogonalize_pieces(ns, [local], [source], mode):
        piece = plan.pieces[number]
        piece.window(out).copy_(piece.fold(o))
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
