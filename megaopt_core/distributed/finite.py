"""Finding the parameter and the rank of a gradient that is not finite, before it is reduced."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from attrs import define, field

from megaopt_core.distributed.bucket import Bucket
from megaopt_core.errors import GradientError
from megaopt_core.parallel.groups import size_of

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
    """

    names: list[str]
    group: ProcessGroup | None
    device: torch.device
    _found: str | None = field(default=None, init=False)

    def look(self, bucket: Bucket) -> None:
        """Look at a bucket whose gradients are this rank's own.

        Args:
            bucket: the bucket.
        """
        if self._found is not None or bucket.grad_data is None:
            return
        if bool(
            torch.isfinite(torch.linalg.vector_norm(bucket.grad_data.detach(), ord=1, dtype=torch.float32))
        ):
            return
        for name, (start, stop) in bucket.params.items():
            if not bool(torch.isfinite(bucket.grad_data[start:stop]).all()):
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
            raise GradientError(f"gradients are not finite: {told}", names=culprits.values())
