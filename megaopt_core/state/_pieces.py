"""The state of one piece, wherever it is kept."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from attrs import frozen

from megaopt_core.execution._placeholders import StatePlaceholder
from megaopt_core.params._shards import Shard, whole
from megaopt_core.params._specs import ParamInfo
from megaopt_core.precision._state_codes import CodedState

if TYPE_CHECKING:
    from megaopt_core.execution._exchanged_step import ExchangedStep
    from megaopt_core.state._protocol import NamedPieces, StatefulOptimizer


__all__ = ["OwnedState", "PieceState", "is_number", "piece_states", "states_of"]


@frozen(eq=False)
class PieceState:
    """One piece's state, wherever it is kept.

    Args:
        part: the part that steps the piece.
        index: position of the piece.
    """

    part: NamedPieces
    index: int

    @property
    def stepped(self) -> torch.Tensor:
        """The tensor that the inner optimizer steps; of no memory between steps under some precision policies."""
        return self.part.stepped[self.index]

    @property
    def members(self) -> tuple[tuple[int, Shard], ...]:
        """`(offset, shard)` of every parameter that the piece holds elements of."""
        return self.part.pieces[self.index].spec.members

    @property
    def inner(self) -> dict[str, Any]:
        """What the inner optimizer keeps; live."""
        state: dict[str, Any] = self.part.inner.state[self.stepped]
        return state

    def _keep(self, state: dict[str, Any]) -> None:
        self.part.inner.state[self.stepped] = state

    def adopt(self) -> None:
        """Make what was written into a placeholder the state."""
        self._keep(dict(self.inner))

    def start_anew(self) -> None:
        """Give up the state; the next step makes it."""
        if self.inner:
            self._keep(StatePlaceholder(self.inner))

    @property
    def extra(self) -> Mapping[str, torch.Tensor]:
        """What the precision policy keeps: `main_param`, or nothing."""
        return self.part.precision.extra_state(self.index)

    def is_elementwise(self, key: str, value: Any) -> bool:
        """Return whether a state has one element for every element of the piece.

        Args:
            key: the state's key.
            value: the state.
        """
        is_of_piece = isinstance(value, torch.Tensor) and value.shape == self.stepped.shape
        return is_of_piece and key not in self.part.scalar_states

    def coded(self, key: str) -> CodedState | None:
        """Return how a state is saved that the precision policy stores in a code; None: as it is.

        Args:
            key: the state's key; it has a value.
        """
        return self.part.precision.coded_state(self.index, key, self.inner) if self.is_coded(key) else None

    def is_coded(self, key: str) -> bool:
        """Return whether the precision policy stores a state in a code.

        Args:
            key: the state's key.
        """
        return self.part.precision.is_coded(self.index, key)

    @property
    def is_whole(self) -> bool:
        """True when the piece is all that this rank's model has of one parameter."""
        ((_, shard), *rest) = self.members
        return not rest and shard.numel == self.stepped.numel() and shard.start == 0

    def holds(self, key: str) -> bool:
        """Return whether a state key has its place here; with a split step some are kept by the parameter's owner.

        Args:
            key: the state's key.
        """
        return self.part.split is None or key not in self.part.split.transform_keys


@frozen(eq=False)
class OwnedState(PieceState):
    """What a split step keeps of a whole tensor that this rank transforms.

    Args:
        part: the part that transforms it.
        index: its position among the tensors that are transformed here.
        split: drives the step.
    """

    split: ExchangedStep

    @property
    def info(self) -> ParamInfo:
        """What it is."""
        return self.split.exchange.owned[self.index]

    @property
    def stepped(self) -> torch.Tensor:
        """A tensor of its shape, of no memory."""
        return self.split.stand_in(self.info)

    @property
    def members(self) -> tuple[tuple[int, Shard], ...]:
        """All of the parameter, or the matrices of a batch that are transformed here."""
        name, shape, offsets = self.info.name, self.info.shape, self.info.offsets
        logical = self.split.logical_shape(self.info) if offsets else shape
        box = (offsets, shape) if offsets else whole(shape)
        return ((0, Shard(name, logical, box, 0, math.prod(shape))),)

    @property
    def inner(self) -> dict[str, Any]:
        """What `transform` keeps; live."""
        return self.split.transform_state.get(self.info.name, {})

    def _keep(self, state: dict[str, Any]) -> None:
        self.split.transform_state[self.info.name] = state

    @property
    def extra(self) -> Mapping[str, torch.Tensor]:
        """Nothing: main parameters are cut like their pieces."""
        return {}

    def is_coded(self, key: str) -> bool:
        """Return False: precision policies store the state of pieces only.

        Args:
            key: the state's key.
        """
        return False

    def holds(self, key: str) -> bool:
        """Return whether a state key belongs to `transform`.

        Args:
            key: the state's key.
        """
        return key in self.split.transform_keys


def states_of(part: NamedPieces) -> Iterator[PieceState]:
    """Yield the state of every piece of a part, and of every tensor that its split step transforms here.

    Args:
        part: what one inner optimizer steps.
    """
    for index in range(len(part.pieces)):
        yield PieceState(part, index)
    if part.split is not None and part.split.transform_keys:
        for index in range(len(part.split.exchange.owned)):
            yield OwnedState(part, index, part.split)


def piece_states(optimizer: StatefulOptimizer) -> Iterator[PieceState]:
    """Yield the states of all parts.

    Args:
        optimizer: a built optimizer.
    """
    for part in optimizer.parts:
        yield from states_of(part)


def is_number(value: Any) -> bool:
    """Return whether a state is one value for all of its piece.

    Args:
        value: the state.
    """
    if isinstance(value, torch.Tensor):
        return value.numel() == 1
    return value is None or isinstance(value, (bool, int, float, str))
