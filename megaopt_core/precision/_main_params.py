"""The policy of mixed precision: fp32 main copies of the model's parameters are stepped."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from attrs import define, field

from megaopt_core.precision._base_policy import BasePrecisionPolicy
from megaopt_core.precision._lending import GradLending
from megaopt_core.precision._policy import LOW_PRECISION, MAIN_PARAM
from megaopt_core.precision._storage import take_changed
from megaopt_core.sharding._live_model import Piece

__all__ = ["MainParams"]


@define
class MainParams(BasePrecisionPolicy):
    """An fp32 main copy of every fp16 or bf16 piece is stepped; fp32 pieces are stepped in place.

    Args:
        main_dtype: dtype of the main copies.
    """

    main_dtype: torch.dtype = torch.float32
    is_mixed: bool = field(default=True, init=False)
    _pieces: Sequence[Piece] = field(factory=list, init=False)
    _stepped: Sequence[torch.Tensor] = field(factory=list, init=False)
    _lending: GradLending = field(factory=GradLending, init=False)

    def attach(self, pieces: Sequence[Piece]) -> list[torch.Tensor]:
        """Return main copies, made now.

        Args:
            pieces: this rank's pieces of one inner optimizer.
        """
        super().attach(pieces)
        self._stepped = [self._main(piece.param) for piece in pieces]
        return list(self._stepped)

    def _main(self, param: torch.Tensor) -> torch.Tensor:
        if param.dtype not in LOW_PRECISION:
            return param
        return torch.nn.Parameter(param.detach().to(self.main_dtype, copy=True))

    def _tensor(self, piece: Piece) -> torch.Tensor:
        return self._main(piece.param)

    def write_back(self, indices: Sequence[int]) -> None:
        """Round main copies into the model's parameters.

        Args:
            indices: positions of the pieces that were stepped.
        """
        models, mains = self._copies(indices)
        if mains:
            torch._foreach_copy_(models, mains)

    def _copies(self, indices: Sequence[int]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return the model's tensor and the main copy of every one of these pieces that has one."""
        copied = [index for index in indices if self.extra_keys(index)]
        return [self._pieces[index].param for index in copied], [self._stepped[index] for index in copied]

    def reload_model_params(self) -> None:
        """Take the model's parameters over into the main copies."""
        self.take_over(range(len(self._pieces)))

    def take_over(self, indices: Sequence[int]) -> None:
        """Copy those of the model's values into main copies that these do not round to.

        Args:
            indices: positions of the pieces that somebody wrote to.
        """
        for model, main in zip(*self._copies(indices), strict=True):
            take_changed(main, model)

    def extra_keys(self, index: int) -> tuple[str, ...]:
        """Return the main copy's key, where there is one.

        Args:
            index: position of the piece.
        """
        return () if self._stepped[index] is self._pieces[index].param else (MAIN_PARAM,)

    def extra_state(self, index: int) -> dict[str, torch.Tensor]:
        """Return the main copy, where there is one.

        Args:
            index: position of the piece.
        """
        return dict.fromkeys(self.extra_keys(index), self._stepped[index])

    def set_extra_state(self, index: int, key: str, value: torch.Tensor) -> None:
        """Copy a main value into the main copy, where there is one.

        Args:
            index: position of the piece.
            key: `"main_param"`.
            value: of any floating dtype.
        """
        if key in self.extra_keys(index):
            with torch.no_grad():
                self._stepped[index].copy_(value)
