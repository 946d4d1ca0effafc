"""Orthogonalizing the updates of many parameters: equal shapes together, cut matrices with their other ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from attrs import evolve

from megaopt_muon.choice.methods import MethodBook, is_narrow
from megaopt_muon.newton_schulz.iteration import NewtonSchulz
from megaopt_muon.newton_schulz.scaled import Scaled
from megaopt_muon.pieces.batches import Orthogonalized, batch_key, batched, padded
from megaopt_muon.pieces.half_batches import HalfBatches, Member
from megaopt_muon.pieces.plans import MatrixPlan
from megaopt_muon.products.precision import at_least_float32, compute_dtype, matmul_precision
from megaopt_muon.tensor_parallel.orthogonalize import (
    all_gather,
    orthogonalize_distributed,
    orthogonalize_duplicated,
    own_part,
)

__all__ = ["merged", "merged_together", "orthogonalize_pieces", "scales_of"]


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
        `(index of the plan, index of the piece, orthogonalized [*batch, rows, columns])`, times the plan's scale. The
        tensor is valid until the next is asked for.
    """
    batches, half, cut = _ways(ns, plans, updates)
    with matmul_precision(ns.precision):
        for (kind, *_), members in batches.items():
            if kind == "single":
                for index, number in members:
                    matrix = plans[index].pieces[number].read(updates[index])
                    square = squares[index] if squares else None
                    whole = len(plans[index].pieces) == 1
                    yield (
                        index,
                        number,
                        ns.scaled(
                            matrix,
                            book,
                            consume=square is not None,
                            square=square if whole else None,
                            factor=plans[index].scales[number],
                        ),
                    )
            else:
                run = padded if kind == "padded" else batched
                for index, number, result in run(ns, plans, updates, members, book):
                    yield (
                        index,
                        number,
                        result if kind == "padded" else result.times(plans[index].scales[number]),
                    )
    found = {(index, number): plans[index].pieces[number].read(updates[index]) for index, number in half}
    for results in HalfBatches(ns, plans, half, book).fill(found):
        for (index, number), o in results:
            yield index, number, o.times(plans[index].scales[number])
    for index, number in cut:
        yield index, number, _of_several_ranks(ns, plans[index], number, updates[index], book)


def _ways(
    ns: NewtonSchulz, plans: Sequence[MatrixPlan], updates: Sequence[torch.Tensor]
) -> tuple[dict[tuple[Any, ...], list[Member]], dict[Member, torch.device], list[Member]]:
    """Return which matrices go in which batches, in those of float16 with their devices, and with other ranks."""
    batches: dict[tuple[Any, ...], list[Member]] = {}
    half: dict[Member, torch.device] = {}
    cut: list[Member] = []
    are_narrow = {
        (dtype, device): is_narrow(compute_dtype(ns.precision, dtype, device), device)
        for dtype, device in {(update.dtype, update.device) for update in updates}
    }
    for index, plan in enumerate(plans):
        update = updates[index]
        for number, piece in enumerate(plan.pieces):
            if plan.cut is not None and plan.cut.mode != "whole":
                cut.append((index, number))
            elif ns.is_half(update.device):
                half[index, number] = update.device
            else:
                narrow = are_narrow[update.dtype, update.device]
                batches.setdefault(batch_key(piece.shape, update, narrow=narrow), []).append((index, number))
    return batches, half, cut


def _of_several_ranks(
    ns: NewtonSchulz, plan: MatrixPlan, number: int, update: torch.Tensor, book: MethodBook | None
) -> Scaled:
    """Return one orthogonalized and scaled matrix, of which each rank of the cut has a part."""
    piece, scale = plan.pieces[number], plan.scales[number]
    assert plan.cut is not None  # noqa: S101 - selected before
    part = piece.read(update)
    flat = part.reshape(-1, *piece.shape[-2:]) if part.dim() > 3 else part
    if plan.cut.mode == "distributed":
        o = orthogonalize_distributed(ns, flat, plan.cut.group, plan.cut.dim).mul_(scale)
    else:
        o = orthogonalize_duplicated(ns, flat, plan.cut.group, plan.cut.dim, book, scale)
    return Scaled(o.view(piece.shape))


def merged(
    ns: NewtonSchulz,
    plan: MatrixPlan,
    update: torch.Tensor,
    book: MethodBook | None = None,
    *,
    scaled: bool,
) -> torch.Tensor:
    """Return one parameter's orthogonalized update as a new tensor of its stored shape.

    Args:
        ns: how to orthogonalize.
        plan: what the parameter consists of.
        update: of the parameter's stored shape.
        book: the methods to take; None: those of `ns`.
        scaled: times the plan's scales.
    """
    source = update
    if plan.gather_first:
        assert plan.cut is not None  # noqa: S101 - gathering needs a cut
        source = all_gather(update, plan.cut.group, plan.cut.stored_dim)
    whole = evolve(plan, cut=None, gather_first=False) if plan.gather_first else plan
    (out,) = merged_together(ns, [whole], [source], book, scaled=scaled)
    if plan.gather_first and plan.cut is not None:
        return own_part(out, plan.cut.group, plan.cut.stored_dim)
    return out


def merged_together(
    ns: NewtonSchulz,
    plans: Sequence[MatrixPlan],
    updates: Sequence[torch.Tensor],
    book: MethodBook | None = None,
    *,
    scaled: bool,
) -> list[torch.Tensor]:
    """Return the orthogonalized updates of many parameters as new tensors of their stored shapes.

    Args:
        ns: how to orthogonalize.
        plans: what each parameter consists of; none of them gathers first.
        updates: one per plan, of the parameter's stored shape.
        book: the methods to take; None: those of `ns`.
        scaled: times the plans' scales.
    """
    if not scaled:
        plans = [evolve(plan, scales=(1.0,) * len(plan.scales)) for plan in plans]
    found = [
        torch.empty(update.shape, dtype=at_least_float32(update.dtype), device=update.device)
        for update in updates
    ]
    for index, number, o in orthogonalize_pieces(ns, plans, updates, book):
        piece = plans[index].pieces[number]
        window = piece.window(found[index])
        window.copy_(piece.fold(o.values))
        if o.scale != 1.0:
            window.mul_(o.scale)
    return found


def scales_of(plan: MatrixPlan, update: torch.Tensor) -> float | torch.Tensor:
    """Return the scale of one parameter's update: a number, or a tensor that broadcasts to its stored shape.

    Args:
        plan: what the parameter consists of.
        update: tells the dtype and the device of the tensor.
    """
    if len(set(plan.scales)) == 1:
        return plan.scales[0]
    dim = plan.pieces[0].dim
    assert dim is not None  # noqa: S101 - several scales mean several pieces
    lengths = [1] * len(plan.shape)
    lengths[dim] = plan.pieces[0].groups * plan.pieces[0].total
    scales = update.new_empty(lengths)
    for piece, scale in zip(plan.pieces, plan.scales, strict=True):
        piece.window(scales).fill_(scale)
    if plan.gather_first and plan.cut is not None:
        return own_part(scales, plan.cut.group, plan.cut.stored_dim)
    return scales
