"""Finding the parameter and the rank of a gradient that cannot be added up, before it is reduced."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from attrs import define, field

from megaopt_core.errors import GradientError
from megaopt_core.parallel import size_of
from megaopt_distributed.buffers.bucket import Bucket

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["FiniteCheck"]


@define(eq=False)
class FiniteCheck:
    """Looks at gradients before they are reduced and raises on every rank once all were looked at.

    Args:
        names: every parameter, in the same order on all ranks.
        group: the ranks that are told.
        device: where ranks exchange what they found.
        large: find gradients too that all ranks together could not add up: `|g| * ranks` is beyond the dtype's range.
    """

    names: list[str]
    group: ProcessGroup | None
    device: torch.device
    large: bool = False
    _found: str | None = field(default=None, init=False)

    def look(self, bucket: Bucket) -> None:
        """Look at a bucket whose gradients are this rank's own.

        Args:
            bucket: the bucket.
        """
        if self._found is not None or bucket.grad_data is None:
            return
        grads = bucket.grad_data.detach()
        values = torch.view_as_real(grads) if grads.is_complex() else grads
        ranks = bucket.reduction.shards.size * bucket.reduction.replicas.size
        limit = torch.finfo(values.dtype).max / (ranks if self.large else 1)
        if _is_within(values, limit):
            return
        for name, (start, stop) in bucket.params.items():
            if start < stop and not _is_within(values[start:stop], limit):
                self._found = name
                return

    def tell(self) -> None:
        """Raise on all ranks when one of them has found something.

        Raises:
            GradientError: it names the parameters and the ranks.
        """
        mine = -1 if self._found is None else self.names.index(self._found)
        self._found = None
        ranks = size_of(self.group)
        found = torch.full((ranks,), -1, dtype=torch.int64, device=self.device)
        own = torch.tensor([mine], dtype=torch.int64, device=self.device)
        if ranks > 1:
            dist.all_gather(list(found.split(1)), own, group=self.group)
        else:
            found.copy_(own)
        culprits = {rank: self.names[index] for rank, index in enumerate(found.tolist()) if index >= 0}
        if culprits:
            ranks_of = [
                rank if self.group is None else dist.get_global_rank(self.group, rank) for rank in culprits
            ]
            told = ", ".join(
                f"{name!r} on rank {rank}" for rank, name in zip(ranks_of, culprits.values(), strict=True)
            )
            what = "not finite, or too large to be added up over all ranks" if self.large else "not finite"
            raise GradientError(f"gradients are {what}: {told}", names=culprits.values())


def _is_within(values: torch.Tensor, limit: float) -> bool:
    """Return whether no magnitude is above a limit; NaN is."""
    if not values.numel():
        return True
    low, high = torch.stack(torch.aminmax(values)).tolist()
    return bool(-limit <= low and high <= limit)
