"""The processes that share the work of a run."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from attrs import frozen
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

if TYPE_CHECKING:
    from megaopt_tools.model import GPT

__all__ = ["ALONE", "Ranks"]


@frozen
class Ranks:
    """The processes of a run, over gloo on CPUs.

    Args:
        index: this process among them.
        count: how many there are.

    Example:
        >>> ALONE.share(torch.arange(4)).tolist()
        [0, 1, 2, 3]
    """

    index: int = 0
    count: int = 1

    @classmethod
    def current(cls) -> Ranks:
        """Return those of the default process group; without one, this process is alone."""
        if not distributed.is_initialized():
            return ALONE
        return cls(distributed.get_rank(), distributed.get_world_size())

    @property
    def is_first(self) -> bool:
        """Whether this process shows and writes what all of them do."""
        return self.index == 0

    def wrap(self, model: GPT, sharding: str | None) -> nn.Module:
        """Return the model as the strategy takes it.

        Args:
            model: the same on all ranks.
            sharding: the strategy; None: every rank steps everything.
        """
        if self.count == 1:
            return model
        if sharding != "fsdp":
            return DistributedDataParallel(model)
        mesh = init_device_mesh("cpu", (self.count,), mesh_dim_names=("dp",))
        for block in model.blocks.children():
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        return model

    def share(self, batch: torch.Tensor) -> torch.Tensor:
        """Return the rows of a batch that are this process's own.

        Args:
            batch: the same on all ranks; its rows can be divided by their number.
        """
        return batch.chunk(self.count)[self.index]

    def agree(self, loss: float, *, stop: bool) -> tuple[float, bool]:
        """Return the mean loss of all ranks, and whether any of them wants to stop.

        Args:
            loss: of this process's rows.
            stop: whether this process wants to stop.
        """
        if self.count == 1:
            return loss, stop
        values = torch.tensor([loss, float(stop)], dtype=torch.float64)
        distributed.all_reduce(values)
        total, stops = values.tolist()
        return total / self.count, stops > 0

    def gather(self, value: torch.Tensor) -> torch.Tensor:
        """Return the values of all ranks, one below the other.

        Args:
            value: of the same shape on all ranks.
        """
        if self.count == 1:
            return value[None]
        values = [torch.empty_like(value) for _ in range(self.count)]
        distributed.all_gather(values, value)
        return torch.stack(values)


ALONE = Ranks()
"""A process by itself."""
