"""Steps in three parts, and how the middle one's tensors travel between ranks. Provisional names."""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from attrs import frozen

from megaopt_core.params._specs import ParamInfo

__all__ = ["Exchange", "Sent", "SplitStep", "StatefulSplitStep", "Travel"]


class SplitStep(Protocol):
    """An optimizer's step in three parts, of which only the second must see whole tensors.

    For every parameter `step()` equals `local_updates`, `transform` and `apply` over whole tensors bit for bit, and the
    first and the third commute with slicing: what they do to a slice is the slice of what they do to the whole. The
    check `split_step` of the conformance kit proves both.
    """

    def init_state(self, params: Sequence[torch.Tensor]) -> None:
        """Make the state that `local_updates` makes where there is none yet, and change nothing else.

        Args:
            params: tensors of the inner optimizer's groups, as `local_updates` is given them.
        """

    def local_updates(self, params: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return what is to be transformed: everything of a step that is element-wise and comes before.

        It reads `grad`, decays the parameter, and updates its state, which it makes where there is none yet.

        Args:
            params: tensors of the inner optimizer's groups, each with a gradient; slices of parameters of any shape,
                also without elements. All that are stepped together come at once; there may be none.

        Returns:
            One tensor a parameter, of its shape and dtype. It may be a state tensor itself: nobody writes into it.
        """

    def transform(self, updates: Sequence[torch.Tensor], infos: Sequence[ParamInfo]) -> list[torch.Tensor]:
        """Return what is to be applied; it has none of the parameters and none of their state.

        Args:
            updates: whole logical tensors, of `info.shape` and of the dtype of what is stepped.
            infos: what each is; `info.group` is the position of its group in the inner optimizer's `param_groups`.

        Returns:
            One tensor an update, of its shape; it travels in float32 or wider.
        """

    def apply(self, params: Sequence[torch.Tensor], updates: Sequence[torch.Tensor]) -> None:
        r"""Apply transformed updates, element by element: :math:`p \leftarrow p - \eta u`.

        Args:
            params: what `local_updates` was given, in that order.
            updates: of the shapes of `params`, in float32 or wider also for narrower parameters; nobody reads them
                afterwards.
        """


@runtime_checkable
class StatefulSplitStep(SplitStep, Protocol):
    """A split step whose `transform` keeps state of its own, which lives with the owner of each tensor."""

    @property
    def transform_keys(self) -> frozenset[str]:
        """The state keys that belong to `transform`; the inner optimizer's state of slices has none of them."""

    @property
    def transform_state(self) -> MutableMapping[str, dict[str, Any]]:
        """State by `info.name`. Checkpoints hold it under the same keys as if the step were not split."""

    def init_transform_state(self, updates: Sequence[torch.Tensor], infos: Sequence[ParamInfo]) -> None:
        """Make the state of tensors that will be transformed here, as their first `transform` would.

        Args:
            updates: tell shape, dtype and device; what they hold means nothing.
            infos: what each is.
        """


class Exchange(Protocol):
    """How updates travel to the ranks that transform them, and back, a bucket at a time.

    Every piece is in one bucket. What travels is contiguous, and float32 in both directions, or of the piece's own
    dtype where that is wider. The step begins to send bucket k + 1 before it transforms bucket k, and finishes every
    bucket that it began, in order; the order of all calls is the same on every rank.
    """

    @property
    def buckets(self) -> Sequence[Sequence[int]]:
        """Positions of the pieces of each bucket; as many buckets and in the same order on every rank, some empty."""

    @property
    def owned(self) -> Sequence[ParamInfo]:
        """The tensors that this rank transforms. It holds a piece of each, if only one without elements."""

    def start_to_owners(self, bucket: int, updates: Sequence[torch.Tensor | None]) -> None:
        """Begin to send updates to their owners.

        Args:
            bucket: its position.
            updates: one entry a piece of the bucket, of the piece's shape; None where its parameter has no gradient in
                this step, which is so on all ranks alike. They stay as they are until the bucket has arrived.
        """

    def finish_to_owners(self, bucket: int) -> Sequence[tuple[ParamInfo, torch.Tensor]]:
        """Return what has arrived: the whole updates that this rank owns, of parameters that have a gradient.

        Args:
            bucket: its position.
        """

    def start_back(self, bucket: int, transformed: Sequence[torch.Tensor]) -> None:
        """Begin to send transformed updates back to the pieces.

        Args:
            bucket: its position.
            transformed: one tensor for each that `finish_to_owners` returned, in that order.
        """

    def finish_back(self, bucket: int) -> Sequence[torch.Tensor | None]:
        """Return one transformed update a piece of the bucket, of the piece's shape; None where None was sent.

        Args:
            bucket: its position.
        """


@frozen
class Travel:
    """What travels for one parameter in every step.

    Args:
        step: `"split"`: updates go to the owner and come back transformed. `"whole"`: gradients go to the owner, which
            makes the whole step, and values come back.
        bytes: what this rank sends for it in one step.
        owner: where its owner stands among the ranks that share it, such as `"dp 1"`; empty where it is not told.

    Example:
        >>> Travel("split", 1024)
        Travel(step='split', bytes=1024, owner='')
    """

    step: Literal["split", "whole"]
    bytes: int
    owner: str = ""


@frozen
class Sent:
    """What a rank has sent of updates, gradients and values in a step, counted where it is handed to a process group.

    Args:
        bytes: to other ranks.
        collectives: in so many collectives.

    Example:
        >>> Sent(1024, 1) + Sent(512, 1)
        Sent(bytes=1536, collectives=2)
    """

    bytes: int = 0
    collectives: int = 0

    def __add__(self, other: Sent) -> Sent:
        return Sent(self.bytes + other.bytes, self.collectives + other.collectives)
