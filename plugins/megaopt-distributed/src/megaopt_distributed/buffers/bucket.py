"""A bucket: the part of a contiguous buffer that is reduced and gathered as one."""

from __future__ import annotations

import math
from collections.abc import Mapping
from enum import Enum, auto

import torch
from attrs import define, field, frozen

from megaopt_distributed.buffers.communicator import DONE, Communicator, Pending

__all__ = ["Bucket", "GradSync", "Reduction"]


class GradSync(Enum):
    """Where a bucket's gradients are on their way."""

    LOCAL = auto()
    """This rank's own, still being accumulated."""
    UNDER_WAY = auto()
    """Being reduced; nobody may touch them."""
    REDUCED = auto()
    """Reduced: all of them, or this rank's shard."""


@frozen(eq=False)
class Reduction:
    """How the gradients of a buffer become their mean over all ranks.

    Args:
        shards: the ranks that share the buffer out, or all ranks where `scatter` is False.
        replicas: the ranks with the same shard in other instances of the distributed optimizer.
        scatter: leave each rank its shard only.
        average: let the collectives divide.
        factor: what gradients are multiplied by before they are added up.
    """

    shards: Communicator
    replicas: Communicator
    scatter: bool
    average: bool
    factor: float


@define(eq=False)
class Bucket:
    """One bucket of a buffer.

    Args:
        params: name to `[start, stop)` inside the bucket.
        reduction: how gradients are reduced, and who shares the parameters out.
        grad_data: the bucket's part of the gradient buffer; None where gradients are not in a buffer.
        param_data: the bucket's part of the parameter buffer; None where parameters are not in a buffer.
        share_ends: where the share of each rank ends inside the bucket; empty: they are equal.
    """

    params: Mapping[str, tuple[int, int]]
    reduction: Reduction
    grad_data: torch.Tensor | None = None
    param_data: torch.Tensor | None = None
    share_ends: tuple[int, ...] = ()
    grad_state: GradSync = field(default=GradSync.LOCAL, init=False)
    _grads: Pending = field(default=DONE, init=False)
    _gather: Pending = field(default=DONE, init=False)

    def shard_range(self, numel: int) -> tuple[int, int]:
        """Return this rank's `[start, stop)` inside the bucket.

        Args:
            numel: elements of the bucket.
        """
        rank = self.reduction.shards.rank
        if self.share_ends:
            return (self.share_ends[rank - 1] if rank else 0), self.share_ends[rank]
        size = numel // self.reduction.shards.size
        return rank * size, (rank + 1) * size

    @property
    def _scales_late(self) -> bool:
        """True when only the shard is scaled, after the sum: a power of two makes the same bits before and after."""
        grads = self.grad_data
        power_of_two = math.frexp(self.reduction.factor)[0] == 0.5
        return self.reduction.scatter and power_of_two and grads is not None and grads.dtype == torch.float32

    def start_grad_sync(self) -> None:
        """Begin to reduce the gradients, unless that was begun before."""
        if self.grad_data is None or self.grad_state is not GradSync.LOCAL:
            return
        if not self._scales_late and self.reduction.factor != 1.0:
            self.grad_data.mul_(self.reduction.factor)
        shards, average = self.reduction.shards, self.reduction.average
        if self.reduction.scatter:
            self._grads = shards.reduce_scatter(self.grad_data, self.share_ends, average=average)
        else:
            self._grads = shards.all_reduce(self.grad_data, average=average)
        self.grad_state = GradSync.UNDER_WAY

    def finish_grad_sync(self) -> None:
        """Return when the gradients are reduced."""
        self.start_grad_sync()
        if self.grad_data is None or self.grad_state is GradSync.REDUCED:
            return
        self._grads.wait()
        mine = self.grad_data
        if self.reduction.scatter:
            low, high = self.shard_range(self.grad_data.numel())
            mine = self.grad_data[low:high]
        if self._scales_late:
            mine.mul_(self.reduction.factor)
        if self.reduction.replicas.size > 1:
            self.reduction.replicas.all_reduce(mine, average=self.reduction.average).wait()
        self.grad_state = GradSync.REDUCED

    def reset_grads(self) -> None:
        """Begin a new accumulation; what is under way is waited for and dropped."""
        self._grads.wait()
        self._grads = DONE
        self.grad_state = GradSync.LOCAL

    @property
    def is_gathering(self) -> bool:
        """True from the start of a gather until somebody has waited for it."""
        return self._gather is not DONE

    def start_param_sync(self) -> None:
        """Begin to bring every rank's shard of the parameters to all ranks."""
        if self.param_data is not None:
            self._gather.wait()
            self._gather = self.reduction.shards.all_gather(self.param_data, self.share_ends)

    def finish_param_sync(self) -> None:
        """Return when the parameters of this bucket are up to date."""
        self._gather.wait()
        self._gather = DONE
