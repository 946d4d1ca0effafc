"""This rank's sums over gradients: squares for norms, zeros, and whether a gradient is not finite."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from attrs import define, field

from megaopt_core.optimizers._gradients.statistics import (
    count_zeros,
    is_read_freely,
    sum_of_squares,
    wide_dtype,
)
from megaopt_core.optimizers._part import OptimizerPart

__all__ = ["GradSums", "found_inf_in", "stats_device"]


def stats_device(parts: Sequence[OptimizerPart]) -> torch.device:
    """Return the device that statistics are gathered on: the parameters', or what the backend needs.

    Args:
        parts: the optimizer's parts.
    """
    for part in parts:
        for piece in part.pieces:
            return (*piece.model_params, piece.param)[0].device
    if dist.is_available() and dist.is_initialized() and "nccl" in str(dist.get_backend()):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def found_inf_in(grads: Sequence[torch.Tensor], inv_scale: float, device: torch.device) -> torch.Tensor:
    """Multiply gradients by `inv_scale` in place and return a flag that is above 0 when one is not finite.

    Args:
        grads: gradients, of any devices and dtypes.
        inv_scale: what they are multiplied by.
        device: where the flag lives.
    """
    flag = torch.zeros(1, dtype=torch.float32, device=device)
    by_kind: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for grad in map(_as_real, grads):
        by_kind.setdefault((grad.device, grad.dtype), []).append(grad)
    for (where, _), some in by_kind.items():
        local = torch.zeros(1, dtype=torch.float32, device=where)
        factor = torch.full((1,), inv_scale, dtype=torch.float32, device=where)
        torch._amp_foreach_non_finite_check_and_unscale_(some, local, factor)
        flag = torch.maximum(flag, local.to(device))
    return flag


def _as_real(grad: torch.Tensor) -> torch.Tensor:
    """Return the numbers in a gradient's memory: a complex one has two for each element."""
    if not grad.is_complex():
        return grad
    return torch.view_as_real(grad.conj() if grad.is_conj() else grad)


@define(eq=False)
class GradSums:
    """The sums of one rank, for each group of ranks that adds them up: of squares for each norm, then of zeros.

    Squares that overflow are summed again in the exact range, before other ranks add them up. On a device, which is
    not read for that, all are.

    Args:
        parts: the optimizer's parts.
        keys: the norms, the main one first.
        device: where sums are gathered.
    """

    parts: Sequence[OptimizerPart]
    keys: Sequence[str | None]
    device: torch.device
    groups: dict[dist.ProcessGroup | None, list[OptimizerPart]] = field(init=False)
    """For each statistics group, the parts that it adds up."""
    _squares: dict[dist.ProcessGroup | None, list[torch.Tensor]] | None = field(default=None, init=False)

    @groups.default
    def _by_stats_group(self) -> dict[dist.ProcessGroup | None, list[OptimizerPart]]:
        grouped: dict[dist.ProcessGroup | None, list[OptimizerPart]] = {}
        for part in self.parts:
            grouped.setdefault(part.sharded.stats_group, []).append(part)
        return grouped

    def squares(self) -> dict[dist.ProcessGroup | None, list[torch.Tensor]]:
        """Return one sum of squares for each key, of the gradients that this rank counts; measured once."""
        if self._squares is None:
            self._squares = {group: self._squares_of(parts) for group, parts in self.groups.items()}
        return self._squares

    def _squares_of(self, parts: Sequence[OptimizerPart]) -> list[torch.Tensor]:
        grads: dict[str | None, list[torch.Tensor]] = {key: [] for key in self.keys}
        for part in parts:
            for key, grad in part.counted_grads():
                grads[key].append(grad)
        return [self._sum(some) for some in grads.values()]

    def _sum(self, grads: Sequence[torch.Tensor]) -> torch.Tensor:
        return sum_of_squares(grads, self.device, exact_range=not is_read_freely(self.device))

    def zeros(self) -> dict[dist.ProcessGroup | None, torch.Tensor]:
        """Return how many elements are zero, of the gradients that this rank counts."""
        return {
            group: count_zeros((grad for part in parts for _, grad in part.counted_grads()), self.device)
            for group, parts in self.groups.items()
        }

    def found_inf(self) -> torch.Tensor:
        """Return whether a gradient is not finite that is stepped here, whoever counts it."""
        found = [square for some in self.squares().values() for square in some]
        uncounted = [grad for part in self.parts for grad in part.uncounted_grads()]
        if uncounted:
            found.append(self._sum(uncounted))
        everything = found[0] if len(found) == 1 else torch.stack(found).sum()
        return everything - everything != 0  # the same as `~isfinite`, which launches five kernels

    def rows(
        self, norms: bool, counts: Mapping[dist.ProcessGroup | None, torch.Tensor] | None = None
    ) -> dict[dist.ProcessGroup | None, torch.Tensor]:
        """Return what ranks add up: a sum for each key, zeros where nobody asked for norms, then the number of zeros.

        Args:
            norms: sum squares.
            counts: what :meth:`zeros` returned; None: nobody counts zeros.
        """
        rows = {group: torch.stack(some) for group, some in self.squares().items()} if norms else {}
        if counts is None:
            return rows
        rows = rows or self.neutral(zeros=False)
        return {group: torch.cat([row, counts[group].view(1)]) for group, row in rows.items()}

    def neutral(self, *, zeros: bool) -> dict[dist.ProcessGroup | None, torch.Tensor]:
        """Return the rows of a rank that has nothing to add.

        Args:
            zeros: with a number of zeros.
        """
        width = len(self.keys) + zeros
        return {
            group: torch.zeros(width, dtype=wide_dtype(self.device), device=self.device)
            for group in self.groups
        }
