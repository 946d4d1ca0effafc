"""Collectives whose failure says what to do."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.distributed as dist

from megaopt_core.errors import CommunicationError, UnsupportedOperationError
from megaopt_core.parallel._timeouts import timeout_of

__all__ = ["all_reduce", "gather_objects", "needs_all_ranks", "new_group", "stopped"]


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


@contextmanager
def needs_all_ranks(what: str) -> Iterator[None]:
    """Say what failed where torch finds that a rank is gone; it may do so when a message is begun, too.

    Args:
        what: what is done, for the error.

    Raises:
        CommunicationError: another rank has stopped, or the process group's timeout is over.
        UnsupportedOperationError: torch cannot send Python objects here.
    """
    try:
        yield
    except RuntimeError as error:
        if "Numpy is not available" in str(error):
            raise UnsupportedOperationError(
                f"{what} failed: torch sends Python objects between ranks by way of NumPy, which is not installed: "
                "pip install numpy"
            ) from error
        raise stopped(what, error) from error


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
    with needs_all_ranks(what):
        dist.all_reduce(tensor, op=op, group=group)


def gather_objects[T](value: T, group: dist.ProcessGroup, what: str) -> list[T]:
    """Return the values of all ranks of a group, in the order of its ranks.

    Args:
        value: this rank's; picklable.
        group: the ranks.
        what: the collective, in words, for the error.

    Raises:
        CommunicationError: another rank has stopped, or the process group's timeout is over.
    """
    told: list[Any] = [None] * group.size()
    with needs_all_ranks(what):
        dist.all_gather_object(told, value, group=group)
    return told


def new_group(ranks: Sequence[int], like: dist.ProcessGroup, what: str) -> dist.ProcessGroup:
    """Return a group of some ranks, which waits as long as another does; only its ranks take part in making it.

    Args:
        ranks: ranks in the default group.
        like: the group whose timeout it gets.
        what: what it is for, in words, for the error.

    Raises:
        CommunicationError: another rank has stopped, or has not come before the timeout was over.
    """
    with needs_all_ranks(what):
        made = dist.new_group(list(ranks), timeout=timeout_of(like), use_local_synchronization=True)
    return cast("dist.ProcessGroup", made)
