"""Whether the ranks that hold parts of a matrix hold equal ones, as gathering and scales take for granted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from megaopt_core.errors import ViewError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["require_equal_parts"]


def require_equal_parts(
    params: Sequence[torch.Tensor],
    dims: Sequence[int],
    by_head: Sequence[bool],
    group: ProcessGroup,
    mode: str,
) -> None:
    """Raise on all ranks unless they hold equal parts of every parameter, or whole heads of it; all of them call it.

    Args:
        params: parts of this rank, in an order that all ranks share; at least one.
        dims: the stored dimension that each is cut along.
        by_head: which of them are taken apart into heads, all of which are whole on this rank.
        group: the ranks.
        mode: how the parameters are orthogonalized, for the message.

    Raises:
        ViewError: a rank holds more of a parameter than another one.
    """
    extents = [param.shape[dim] for param, dim in zip(params, dims, strict=True)]
    smaller, apart = [-extent for extent in extents], [-int(whole) for whole in by_head]
    bounds = torch.tensor([extents, smaller, apart], device=params[0].device)
    dist.all_reduce(bounds, dist.ReduceOp.MAX, group)
    for param, dim, most, least, cut_heads in zip(params, dims, *bounds.tolist(), strict=True):
        if most != -least and cut_heads != -1:
            name = getattr(getattr(param, "param_info", None), "name", None)
            raise ViewError(
                f"parameter{'' if name is None else f' {name!r}'} of shape {tuple(param.shape)} on this rank: "
                f"tensor-parallel ranks hold from {-least} to {most} of dimension {dim}, and tp_mode={mode!r} takes "
                "equal parts; cut it evenly (pad it), or set tp_mode='blockwise'"
            )
