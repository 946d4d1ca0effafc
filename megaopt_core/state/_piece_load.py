"""What a load of a plain state dict writes into the state of one piece."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import torch
from attrs import frozen
from torch.utils._pytree import tree_map

from megaopt_core.errors import CheckpointMismatchError
from megaopt_core.precision._policy import MAIN_PARAM
from megaopt_core.precision._state_codes import StoredSlice
from megaopt_core.state._fitting import misfit, number_kind
from megaopt_core.state._pieces import PieceState, is_number

__all__ = ["PieceLoad"]


@frozen
class PieceLoad:
    """What a load writes into the state of one piece.

    Args:
        piece: whose state.
        name: of its parameter.
        source: what errors call that which is loaded.
        writes: receives what is done, in order.
    """

    piece: PieceState
    name: str
    source: str
    writes: list[Callable[[], None]]

    def plan(self, state: Mapping[str, Any], main: Any) -> list[str]:
        """Find out what is written, and return the keys of state that is here, but not in what was saved.

        Args:
            state: state key to value; empty: it starts anew, or stays.
            main: the main value; None: none was saved.

        Raises:
            CheckpointMismatchError: a state cannot be what it should become here.
        """
        precision, live = self.piece.part.precision, self.piece.inner
        kept = [key for key in live if key != MAIN_PARAM and not precision.is_code(key)]
        for key, value in state.items():
            if key in live and precision.is_code(key):
                continue
            present = live.get(key)
            self._plan_key(key, present, value)
            why = misfit(key, present, value)
            if why is not None:
                self._refuse(key, f"is {value!r}, which {why}")
        self._plan_main(main)
        if state:
            self.writes.append(self.piece.adopt)
        return [key for key in kept if state and key not in state]

    def _refuse(self, key: str, what: str) -> NoReturn:
        raise CheckpointMismatchError(
            f"state {key!r} of {self.name!r} in {self.source} {what}", path=self.source, names=[self.name]
        )

    def _plan_key(self, key: str, present: Any, value: Any) -> None:
        is_tensor = isinstance(value, torch.Tensor) and key not in self.piece.part.scalar_states
        if is_tensor and value.shape == self.piece.stepped.shape:
            self._plan_elements(key, present, value.detach())
        elif is_number(value):
            if self.piece.is_elementwise(key, present):
                self._refuse(key, "is a number there and has its parameter's shape here")
            self._plan_number(key, present, value)
        else:
            self._plan_object(key, present, value)

    def _plan_elements(self, key: str, present: Any, value: torch.Tensor) -> None:
        piece = self.piece
        if piece.is_coded(key):
            precision, slices = piece.part.precision, [StoredSlice(0, value.reshape(-1))]
            self.writes.append(lambda: precision.restore_state(piece.index, key, piece.inner, slices))
        elif not isinstance(present, torch.Tensor):
            self._set(key, value.to(piece.stepped.device, copy=True).contiguous())
        elif not piece.is_elementwise(key, present):
            self._refuse(key, f"has its parameter's shape, here it has shape {tuple(present.shape)}")
        else:
            self._copy(key, present, value)

    def _plan_number(self, key: str, present: Any, value: Any) -> None:
        if isinstance(present, torch.Tensor):
            if present.numel() != 1:
                self._refuse(key, f"is a number there and has shape {tuple(present.shape)} here")
            try:
                made = torch.as_tensor(value).reshape(present.shape)
            except (ArithmeticError, RuntimeError, TypeError, ValueError):
                self._refuse(key, f"is {reprlib.repr(value)}, which cannot become what it is here, a number")
            self.writes.append(lambda: _copy(present, made))
            return
        if isinstance(value, torch.Tensor):
            is_python = isinstance(present, (bool, int, float))
            value = (
                type(present)(value.item()) if is_python else value.to(self.piece.stepped.device, copy=True)
            )
        self._set(key, value)

    def _plan_object(self, key: str, present: Any, value: Any) -> None:
        if not (isinstance(present, torch.Tensor) and isinstance(value, torch.Tensor)):
            self._set(key, tree_map(self._copied, value))
            return
        if present.shape != value.shape:
            self._refuse(key, f"has shape {tuple(value.shape)}, here it has shape {tuple(present.shape)}")
        self._copy(key, present, value)

    def _copied(self, value: Any) -> Any:
        return value.to(self.piece.stepped.device, copy=True) if isinstance(value, torch.Tensor) else value

    def _copy(self, key: str, present: torch.Tensor, value: torch.Tensor) -> None:
        there, here = number_kind(value.dtype), number_kind(present.dtype)
        if there != here:
            self._refuse(key, f"holds {there} ({value.dtype}) there and {here} ({present.dtype}) here")
        self.writes.append(lambda: _copy(present, value))

    def _set(self, key: str, value: Any) -> None:
        self.writes.append(lambda: self.piece.inner.__setitem__(key, value))

    def _plan_main(self, value: Any) -> None:
        present = self.piece.extra.get(MAIN_PARAM)
        if present is None or not isinstance(value, torch.Tensor):
            return
        if value.shape != present.shape:
            self._refuse(
                MAIN_PARAM, f"has shape {tuple(value.shape)}, here it has shape {tuple(present.shape)}"
            )
        if present is self.piece.stepped:
            self._copy(MAIN_PARAM, present, value)
            return
        precision, index = self.piece.part.precision, self.piece.index
        self.writes.append(
            lambda: precision.set_extra_state(index, MAIN_PARAM, value.detach().to(present.dtype, copy=True))
        )


def _copy(present: torch.Tensor, value: torch.Tensor) -> None:
    present.detach().copy_(value)
