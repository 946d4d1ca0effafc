"""Matrices divided by their norms, before the iteration."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import torch

from megaopt_muon.newton_schulz.scaled import Scaled, squared_norm
from megaopt_muon.products.precision import at_least_float32
from megaopt_muon.products.workspace import Workspace

__all__ = [
    "SMALLEST_ALONE",
    "all_normalized",
    "are_worth_it_alone",
    "each_normalized",
    "entered",
    "normalized",
    "within_range",
]

SMALLEST_ALONE: Final = 256
"""Rows and columns from which on matrices are iterated one by one on a processor."""

_LARGEST_OF: Final = torch.float32
_LARGEST: Final = torch.finfo(_LARGEST_OF).max
_SHRINKS: Final = 2.0**-64
"""A factor that changes no digit of what matrices of a larger norm than any number of float32 consist of."""

_FEW_ELEMENTS: Final = 1 << 18
"""Elements of a matrix that an accelerator copies in less time than a call takes."""

_LEAST, _MOST = 1e-20, 1e20
"""Squared norms between which no product of a matrix leaves the range of bfloat16."""


def are_worth_it_alone(rows: int, columns: int) -> bool:
    """Return whether matrices of 16 bits are iterated one by one: products of batches of smaller ones take less time.

    Args:
        rows: of each.
        columns: of each.
    """
    return min(rows, columns) >= SMALLEST_ALONE and rows * columns > SMALLEST_ALONE**2


def normalized(
    update: torch.Tensor, out: torch.Tensor, eps: float = 1e-15, size: float = 1.0
) -> torch.Tensor:
    """Divide each matrix by its Frobenius norm, or by `eps` where that is larger.

    Args:
        update: `[*batch, rows, columns]`.
        out: where the result goes, of the same shape and any floating-point dtype.
        eps: the least divisor.
        size: the norm of the result.
    """
    if update.dim() == 2 and update.device.type == "cpu":
        # A sum in float32 is wrong by a few units, an error that all singular values share; bfloat16 does not notice.
        norm = torch.linalg.vector_norm(update).item() if out.dtype.itemsize == 2 else 0.0
        if not 1e-12 < norm < 1e12:  # or squares may have left float32's range
            norm = torch.linalg.vector_norm(update, dtype=torch.float64).item()
        divisor = (norm if math.isnan(norm) else max(norm, eps)) / size
        if divisor > _LARGEST:
            update, divisor = update * _SHRINKS, divisor * _SHRINKS
        if out.dtype.itemsize > update.dtype.itemsize:  # torch would divide, and round, in the narrower dtype
            return out.copy_(update).div_(divisor)
        return torch.div(update, divisor, out=out)
    dtype = _widest(update.device)
    norms = torch.linalg.vector_norm(update, dim=(-2, -1), keepdim=True, dtype=dtype).clamp_min_(eps)
    norms.div_(size)
    update, norms = within_range(update, norms)
    return torch.div(update, norms.to(at_least_float32(update.dtype)), out=out)


def _widest(device: torch.device) -> torch.dtype:
    """Return the dtype that norms are taken in: float64 but for MPS, which has none."""
    return torch.float32 if device.type == "mps" else torch.float64


def within_range(update: torch.Tensor, norms: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return matrices and their norms, both smaller where a norm is larger than any number of float32.

    On a processor: an accelerator would have to wait for the answer.

    Args:
        update: `[*batch, rows, columns]`, of numbers of float32.
        norms: `[*batch, 1, 1]`, of float64.
    """
    if update.device.type != "cpu" or update.dtype.itemsize > _LARGEST_OF.itemsize:
        return update, norms
    beyond = norms > _LARGEST
    if not bool(beyond.any()):
        return update, norms
    factors = torch.where(beyond, _SHRINKS, 1.0)
    return update * factors.to(torch.promote_types(update.dtype, _LARGEST_OF)), norms * factors


def all_normalized(updates: Sequence[torch.Tensor], out: torch.Tensor, eps: float, size: float = 1.0) -> None:
    """Write equal shapes one after the other, each divided as :func:`normalized` does.

    Args:
        updates: `[*batch, rows, columns]` each.
        out: `[updates, *batch, rows, columns]`, whose rows are contiguous.
        eps: the least divisor.
        size: the norm of each result.
    """
    if out.device.type != "cpu" and updates[0].dim() == 2:
        _normalized_with_few_calls(updates, out, eps, size)
        return
    if out.dtype is not torch.float32 or out.device.type != "cpu" or updates[0].dtype is not torch.float32:
        for update, slot in zip(updates, out, strict=True):
            normalized(update, slot, eps, size)
        return
    for update, slot in zip(updates, out, strict=True):
        slot.copy_(update)
    # Of each row in float32, and over rows in float64: what rows are rounded by is not one error in all.
    norms = _over_rows(torch.linalg.vector_norm(out, dim=-1).double())
    outside = ~((norms > 1e-12) & (norms < 1e12))  # or squares may have left float32's range
    if bool(outside.any()):
        exact = _over_rows(torch.linalg.vector_norm(out, dim=-1, dtype=torch.float64))
        shrunk, norms = within_range(out, torch.where(outside, exact, norms))
        if shrunk is not out:
            out.copy_(shrunk)
    out.div_((norms.clamp_min_(eps) / size).float())


def _normalized_with_few_calls(
    updates: Sequence[torch.Tensor], out: torch.Tensor, eps: float, size: float
) -> None:
    """Do the same on an accelerator, where calls are what counts: matrices that are small are put together first."""
    dtype = _widest(updates[0].device)
    norms = torch.stack(torch._foreach_norm(list(updates), 2, dtype)).clamp_min_(eps)
    norms.div_(size)
    divisors = norms.to(at_least_float32(updates[0].dtype)).view(-1, 1, 1)
    if updates[0].numel() <= _FEW_ELEMENTS:
        torch.div(torch.stack(list(updates)), divisors, out=out)
        return
    for update, divisor, slot in zip(updates, divisors, out, strict=True):
        torch.div(update, divisor, out=slot)


def each_normalized(updates: Sequence[torch.Tensor], places: Sequence[torch.Tensor], eps: float) -> None:
    """Write matrices of a processor, each divided as :func:`normalized` does for 16 bits, with few calls.

    Args:
        updates: `[*batch, rows, columns]` each.
        places: where the results go, of the same shapes and float32: an operation of mixed dtypes takes longer than one
            of a single dtype and a copy of all.
        eps: the least divisor.
    """
    plain = all(update.dtype is torch.float32 and update.dim() == 2 for update in updates)
    norms = [norm.item() for norm in torch._foreach_norm(list(updates))] if plain else [0.0] * len(updates)
    for update, place, norm in zip(updates, places, norms, strict=True):
        if max(1e-12, eps) < norm < 1e12:
            torch.div(update, norm, out=place)
        else:
            normalized(update, place, eps)


def _over_rows(norms: torch.Tensor) -> torch.Tensor:
    """Return the norms of matrices, `[*batch, 1, 1]`, from those of their rows."""
    norm: torch.Tensor = torch.linalg.vector_norm(norms, dim=-1, keepdim=True)
    return norm.unsqueeze(-1)


def entered(
    update: torch.Tensor,
    dtype: torch.dtype,
    workspace: Workspace,
    eps: float,
    *,
    square: float | None,
    consume: bool,
) -> Scaled:
    """Return a matrix in 16 bits, and the factor that makes its norm 1.

    Where the norm is below the floor, or no product of it has the range, and where matrices are small, so that
    others of the shape go as a batch, the matrix is divided instead: the factor is 1.

    Args:
        update: `[rows, columns]`, of any floating-point dtype.
        dtype: of 16 bits.
        workspace: where the result lies.
        eps: the least divisor.
        square: squared norm of the update, where that is known.
        consume: the result may be the update itself.
    """
    narrow = update
    if update.dtype != dtype or not update.is_contiguous() or not consume:
        narrow = workspace.take("narrow", update.shape, dtype, update.device, dense=True).copy_(update)
    if are_worth_it_alone(*update.shape):
        square = squared_norm(narrow, workspace) if square is None else square
        if max(_LEAST, eps**2) < square < _MOST:
            return Scaled(narrow, square**-0.5)
    narrow = workspace.take("narrow", update.shape, dtype, update.device, dense=True)
    return Scaled(normalized(update, narrow, eps))
