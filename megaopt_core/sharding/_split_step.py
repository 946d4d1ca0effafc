"""Steps in three parts, and how what lies between them travels to the owners of whole tensors and back. Provisional."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol, runtime_checkable

import torch
from attrs import frozen

from megaopt_core.params._specs import ParamInfo

__all__ = ["Exchange", "SplitStep", "Travel"]


@runtime_checkable
class SplitStep(Protocol):
    """An optimizer's step in three parts: `step()` equals the three over whole tensors, bit for bit.

    The first and the third work element by element, so that they may run on any slice of a parameter; the second needs
    whole tensors, and runs where their owner is.
    """

    def local_updates(self, params: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return what is to be transformed: decay the parameters, update their state, element by element.

        Args:
            params: tensors of the optimizer's groups that have a gradient: whole parameters, or slices of them.

        Returns:
            One tensor of the same shape for each; it may be the state itself, and is not changed by anyone.
        """

    def transform(self, updates: Sequence[torch.Tensor], infos: Sequence[ParamInfo]) -> list[torch.Tensor]:
        """Return the updates that are applied, of the same shapes.

        Args:
            updates: whole logical tensors.
            infos: what each is; state that is kept here is kept by `info.name`, and lives where the owner is.
        """

    def apply(self, params: Sequence[torch.Tensor], updates: Sequence[torch.Tensor]) -> None:
        """Move the parameters: `p <- p - lr * update`, element by element.

        Args:
            params: what `local_updates` was given.
            updates: the transformed update of each, of its shape.
        """


@runtime_checkable
class Exchange(Protocol):
    """Brings updates to the owners of whole tensors and results back, bucket by bucket.

    Every method is called for every bucket on every rank, in the order of the buckets; while the owners transform one
    bucket the next one travels.
    """

    buckets: Sequence[Sequence[int]]
    """Positions of the pieces of each bucket; as many and in the same order on every rank, some empty."""

    def start_to_owners(self, bucket: int, updates: Sequence[torch.Tensor | None]) -> None:
        """Begin to send updates to their owners.

        Args:
            bucket: its position.
            updates: one for each piece of the bucket; None where its parameter has no gradient in this step, which is
                so on all ranks alike.
        """

    def finish_to_owners(self, bucket: int) -> Sequence[tuple[ParamInfo, torch.Tensor]]:
        """Return the whole tensors of this bucket that this rank owns and that have an update in this step.

        Args:
            bucket: its position.
        """

    def start_back(self, bucket: int, transformed: Sequence[torch.Tensor]) -> None:
        """Begin to send results back.

        Args:
            bucket: its position.
            transformed: one for each tensor that `finish_to_owners` returned, in that order.
        """

    def finish_back(self, bucket: int) -> Sequence[torch.Tensor | None]:
        """Return the result for each piece of the bucket; None where `start_to_owners` was given None.

        Args:
            bucket: its position.
        """


@frozen
class Travel:
    """How a parameter's step reaches the owner of the whole tensor.

    Args:
        step: `"split"`: its update travels, and the state is cut; `"whole"`: its gradient travels, and the owner keeps
            the state.
        bytes: what this rank sends for it in one step, there and back.
    """

    step: Literal["split", "whole"]
    bytes: int
