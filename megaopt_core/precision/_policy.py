"""The protocol of precision policies: which tensor the inner optimizer steps, and how it meets the model's."""

from __future__ import annotations

from collections.abc import Collection, Generator, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from megaopt_core.precision._state_codes import CodedState, Decoder, StoredSlice
from megaopt_core.sharding._live_model import Piece

__all__ = ["LOW_PRECISION", "MAIN_PARAM", "PrecisionPolicy"]

MAIN_PARAM = "main_param"
"""State key of the main parameter that a precision policy keeps."""

LOW_PRECISION = (torch.float16, torch.bfloat16)
"""Dtypes of model parameters that are too coarse to be stepped themselves."""


class PrecisionPolicy(Protocol):
    """What stands between a piece of the model and the tensor that is stepped."""

    @property
    def is_mixed(self) -> bool:
        """True when non-finite gradients skip the step."""

    def attach(self, pieces: Sequence[Piece]) -> list[torch.Tensor]:
        """Return the tensor to step for every piece, in order.

        Args:
            pieces: this rank's pieces of one inner optimizer.
        """

    def extend(self, pieces: Sequence[Piece]) -> list[torch.Tensor]:
        """Return the tensors to step for pieces that come after those of :meth:`attach`.

        Args:
            pieces: pieces that this rank steps from now on.
        """

    def replace(self, index: int, old: torch.Tensor) -> torch.Tensor:
        """Return the tensor to step for a piece whose `param` is another tensor now.

        Args:
            index: position of the piece.
            old: what its `param` was, of the same shape and dtype.
        """

    def load_grads(self) -> None:
        """Give every stepped tensor the gradient that its piece collected."""

    def grad(self, index: int) -> torch.Tensor | None:
        """Return the gradient that a piece will be stepped with; it may be changed in place.

        Args:
            index: position of the piece.
        """

    def batches(self, inner: torch.optim.Optimizer, *, store_all: bool = False) -> Generator[None]:
        """Hand over once for each batch of tensors that `inner` is to step; most policies hand over once.

        Args:
            inner: the optimizer; what its groups hold is stepped.
            store_all: keep what the tensors hold afterwards even where they have no gradient.
        """

    def lent(self, indices: Sequence[int], inner: torch.optim.Optimizer) -> AbstractContextManager[None]:
        """Give the stepped tensors of some pieces their memory inside the block, whatever the groups of `inner` hold.

        Blocks of different pieces may overlap in time.

        Args:
            indices: positions of the pieces.
            inner: the optimizer, for the pieces' state.
        """

    def write_back(self, indices: Sequence[int]) -> None:
        """Bring stepped values into the pieces.

        Args:
            indices: positions of the pieces that were stepped.
        """

    def discard_grads(self) -> None:
        """Drop this step's gradients, and whatever else only the step needs."""

    def reload_model_params(self) -> None:
        """Take the pieces' present values over into the stepped tensors."""

    def take_over(self, indices: Sequence[int]) -> None:
        """Take present values of some pieces over, element by element: what rounds to the model's value stays.

        Args:
            indices: positions of the pieces that somebody wrote to.
        """

    def watched(self) -> list[list[torch.Tensor]]:
        """Return for each piece the tensors in which a change shows."""

    def extra_keys(self, index: int) -> tuple[str, ...]:
        """Return the keys of :meth:`extra_state`, without computing its values.

        Args:
            index: position of the piece.
        """

    def extra_state(self, index: int) -> dict[str, torch.Tensor]:
        """Return state of one piece that the policy owns: `main_param`, where it says more than the model's parameter.

        Args:
            index: position of the piece.
        """

    def set_extra_state(self, index: int, key: str, value: torch.Tensor) -> None:
        """Take over a value that :meth:`extra_state` returned; keys that the policy does not keep are left alone.

        Args:
            index: position of the piece.
            key: its key.
            value: of any floating dtype, of the piece's shape.
        """

    def read_state(self, index: int, key: str, state: Mapping[str, Any]) -> Any:
        """Return one state value as arithmetic sees it, decoded if it is stored in a code of its own.

        Args:
            index: position of the piece.
            key: its key.
            state: the inner optimizer's state of the piece.
        """

    def write_state(self, index: int, key: str, state: MutableMapping[str, Any], value: Any) -> None:
        """Store what :meth:`read_state` returned, in place where a tensor of that shape is there.

        Args:
            index: position of the piece.
            key: its key.
            state: the inner optimizer's state of the piece.
            value: the new value.
        """

    def is_code(self, key: str) -> bool:
        """Return whether a state key holds only how another is stored, such as a scale; it is never saved by itself.

        Args:
            key: the key.
        """

    def is_coded(self, index: int, key: str) -> bool:
        """Return whether a state is stored in a code between steps, once there is one.

        Args:
            index: position of the piece.
            key: the state's key.
        """

    def kept_as_they_are(self) -> Collection[tuple[int, str]]:
        """Return position and key of states that a narrower dtype was asked for, and that do not take it."""

    def coded_state(self, index: int, key: str, state: Mapping[str, Any]) -> CodedState | None:
        """Return how a checkpoint saves a state that is stored in a code, slice by slice; None: as it is.

        Args:
            index: position of the piece.
            key: a key of `state` for which :meth:`is_coded` holds.
            state: the inner optimizer's state of the piece.
        """

    def decoder(self, code: str) -> Decoder | None:
        """Return what decodes a code of this policy or of another; None: unknown here.

        Args:
            code: its name, as :meth:`coded_state` gives it.
        """

    def restore_state(
        self, index: int, key: str, state: MutableMapping[str, Any], slices: Sequence[StoredSlice]
    ) -> None:
        """Take over what was saved: exactly where it is stored alike here, else decoded and stored anew.

        Args:
            index: position of the piece.
            key: the state's key; `state` may lack it.
            state: the inner optimizer's state of the piece.
            slices: what was saved, in the order of the piece's elements; elements in none of them become 0.
        """
