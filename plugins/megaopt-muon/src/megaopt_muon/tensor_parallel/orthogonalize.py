"""Orthogonalizing a matrix whose rows or columns lie on several ranks."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from megaopt_muon.choice.growth import are_tame, largest_norm
from megaopt_muon.newton_schulz.iteration import NewtonSchulz
from megaopt_muon.newton_schulz.norms import within_range
from megaopt_muon.products.precision import at_least_float32, compute_dtype, matmul_precision

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from megaopt_muon.choice.methods import MethodBook

__all__ = [
    "all_gather",
    "all_reduce_sum",
    "orthogonalize_distributed",
    "orthogonalize_duplicated",
    "own_part",
]


def all_gather(part: torch.Tensor, group: ProcessGroup, dim: int) -> torch.Tensor:
    """Return the whole tensor from its equal parts.

    Args:
        part: this rank's part.
        group: the ranks that hold the parts, in order.
        dim: dimension that is cut.
    """
    part = part.contiguous()
    parts = [torch.empty_like(part) for _ in range(group.size())]
    dist.all_gather(parts, part, group=group)
    return torch.cat(parts, dim=dim)


def own_part(whole: torch.Tensor, group: ProcessGroup, dim: int) -> torch.Tensor:
    """Return this rank's part of a whole tensor: the inverse of :func:`all_gather`.

    Args:
        whole: the whole tensor, the same on every rank.
        group: the ranks that hold the parts, in order.
        dim: dimension that is cut.
    """
    length = whole.shape[dim] // group.size()
    return whole.narrow(dim, group.rank() * length, length)


def all_reduce_sum(tensor: torch.Tensor, group: ProcessGroup) -> None:
    """Sum a tensor over ranks in place, in float32 or wider.

    Args:
        tensor: of any strides.
        group: the ranks.
    """
    wide = tensor.to(at_least_float32(tensor.dtype)).contiguous()
    dist.all_reduce(wide, group=group)
    if wide is not tensor:
        tensor.copy_(wide)


def orthogonalize_duplicated(
    ns: NewtonSchulz,
    part: torch.Tensor,
    group: ProcessGroup,
    dim: int,
    book: MethodBook | None = None,
    factor: float = 1.0,
) -> torch.Tensor:
    """Gather the matrix, orthogonalize it on every rank, and return this rank's part.

    Args:
        ns: how to orthogonalize.
        part: `[*batch, rows, columns]`, this rank's part.
        group: the ranks that hold the parts, in order.
        dim: 0 when rows are cut, 1 when columns are.
        book: the methods to take; None: those of `ns`.
        factor: on the result.
    """
    stored_dim = part.dim() - 2 + dim
    return own_part(ns(all_gather(part, group, stored_dim), book, factor), group, stored_dim)


def orthogonalize_distributed(
    ns: NewtonSchulz, part: torch.Tensor, group: ProcessGroup, dim: int
) -> torch.Tensor:
    """Orthogonalize the parts where they are; only Gram matrices travel.

    The Gram matrix is taken over the dimension that is cut, so that it is the sum of the ranks' own: it has the size of
    the other dimension.

    Args:
        ns: how to orthogonalize.
        part: `[*batch, rows, columns]`, this rank's part.
        group: the ranks that hold the parts, in order.
        dim: 0 when rows are cut, 1 when columns are.
    """
    dtype = compute_dtype(ns.precision, part.dtype, part.device)
    norms = torch.linalg.vector_norm(part, dim=(-2, -1), keepdim=True, dtype=torch.float64)
    # A rank that cannot multiply bfloat16 says so: ranks of different dtypes would wait for each other forever.
    wide = norms.new_full((1,), float(dtype.itemsize > 2))
    sums = torch.cat((norms.flatten().square_(), wide))
    dist.all_reduce(sums, group=group)
    if ns.precision == "medium" and part.device.type == "cpu" and sums[-1].item() > 0:
        dtype = torch.float32
    part, norm = within_range(part, sums[:-1].view_as(norms).sqrt().clamp_min_(ns.eps))
    norm = norm.to(at_least_float32(part.dtype))
    x = torch.empty(part.shape, dtype=dtype, device=part.device)
    torch.div(part, norm, out=x)
    iterate = partial(ns.iterate, tall=dim == 0, reduce=lambda gram: all_reduce_sum(gram, group))
    lengths = [part.shape[-2], part.shape[-1]]
    lengths[dim] *= group.size()
    most = largest_norm(ns.coefficients, *lengths)
    with matmul_precision(ns.precision):
        result = iterate(x).clone()
        if are_tame(ns.coefficients):
            return result
        good, normalized = _have_settled(result, most, group), part / norm
        # All ranks find the same, so that all iterate again or none does.
        if dtype.itemsize == 2 and part.device.type == "cpu" and not bool(good.all()):
            again = iterate(normalized.float().clone()).clone()
            normalized = torch.where(_have_settled(again, most, group), again, normalized.float())
    return torch.where(good, result, normalized.to(result.dtype))


def _have_settled(result: torch.Tensor, most: float, group: ProcessGroup) -> torch.Tensor:
    """Return whether whole matrices, of which each rank holds a part, are of a norm up to the largest, and finite."""
    norms: torch.Tensor = torch.linalg.vector_norm(result, dim=(-2, -1), keepdim=True, dtype=torch.float64)
    squares = norms.square_()
    dist.all_reduce(squares, group=group)
    return squares.isfinite() & (squares <= most * most)
