"""Reductions whose failure says what to do."""

from __future__ import annotations

import torch
import torch.distributed as dist

from megaopt_core.errors import CommunicationError

__all__ = ["all_reduce", "stopped"]


def stopped(what: str, error: RuntimeError) -> CommunicationError:
    """Return the error of a collective that another rank has left.

    Args:
        what: the collective, in words.
        error: what torch raised.
    """
    reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    return CommunicationError(
        f"{what} failed: another rank has stopped, or the process group's timeout is over ({reason}). "
        "Restart all ranks from the last checkpoint"
    )


def all_reduce(
    tensor: torch.Tensor,
    group: dist.ProcessGroup | None,
    what: str,
    op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM,
) -> None:
    """Reduce a tensor in place over a group, and wait.

    Args:
        tensor: equal in shape and dtype on every rank.
        group: the ranks.
        what: the collective, in words, for the error.
        op: how values are combined.

    Raises:
        CommunicationError: another rank has stopped, or the process group's timeout is over.
    """
    try:
        dist.all_reduce(tensor, op=op, group=group)
    except RuntimeError as error:
        raise stopped(what, error) from error
