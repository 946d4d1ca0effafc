"""What the core needs of a model's wrapper: it knows no class of one."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import torch

from megaopt_core.parallel._groups import ProcessGroupCollection

if TYPE_CHECKING:
    from megaopt_core.sharding._layout import FullParamLayout

__all__ = ["WrappedModel", "finish_grad_sync", "wrapped"]


@runtime_checkable
class WrappedModel(Protocol):
    """A model chunk whose gradients lie in buffers and are reduced there; `megaopt-distributed` has one.

    Whatever has these members is one; torch's own `DistributedDataParallel` is none, and needs none.
    """

    @property
    def process_groups(self) -> ProcessGroupCollection:
        """The ranks over which gradients are reduced."""

    @property
    def full_param_layout(self) -> FullParamLayout:
        """Where parameters lie in the buffers, and the routing that this was planned for."""

    @property
    def scatters_grads(self) -> bool:
        """True where a gradient is reduced to one rank, not to all."""

    @property
    def forward_waits(self) -> bool:
        """True where parameters may still be on their way when the forward pass begins."""

    def finish_grad_sync(self) -> None:
        """Return when all gradients are reduced."""

    def finish_param_sync(self) -> None:
        """Return when all parameters have arrived."""

    def zero_grad_buffer(self) -> None:
        """Fill all gradients with zeros."""


def wrapped(chunks: Iterable[torch.nn.Module | None]) -> list[WrappedModel | None]:
    """Return each chunk that a wrapper of this kind wraps, None in the place of any other.

    Args:
        chunks: the model chunks.
    """
    return [chunk if isinstance(chunk, WrappedModel) else None for chunk in chunks]


def finish_grad_sync(chunks: Iterable[torch.nn.Module]) -> None:
    """Wait until the gradients of wrapped chunks are reduced; chunks that megaopt does not wrap are left alone.

    Args:
        chunks: the model chunks.
    """
    for chunk in wrapped(chunks):
        if chunk is not None:
            chunk.finish_grad_sync()
