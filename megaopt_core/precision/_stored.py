"""How one piece is stored between steps, as data: a step backend or a checkpoint reads it without the policy's code."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from attrs import frozen

from megaopt_core.precision._state_codes import BLOCKS, block_magnitudes

__all__ = ["REMAINDER", "Stored", "StoredTensor"]

REMAINDER = "remainder"
"""The code of the 16 bits that a bf16 parameter lacks: the fp32 value has the bits `(parameter << 16) + stored`."""


@frozen
class StoredTensor:
    """The layout of one tensor between steps.

    Args:
        dtype: of the stored elements.
        code: how they are read: None: they are values; `SCALED`, `BLOCKS`, `REMAINDER`, or the code of a plugin.
        scale: state key of the scales; empty: there is none.
        block: consecutive elements of the flattened tensor that share a scale; 0: all share one.
        is_positive: no value is negative, and the codes of `BLOCKS` have no sign.

    Example:
        >>> StoredTensor(torch.uint8, BLOCKS, "exp_avg_scale", 256).values[:2]
        (0.0, 1e-06)
    """

    dtype: torch.dtype
    code: str | None = None
    scale: str = ""
    block: int = 0
    is_positive: bool = False

    @property
    def values(self) -> tuple[float, ...]:
        """The number for which each code of :data:`BLOCKS` stands, before its scale; empty: codes are numbers."""
        if self.code != BLOCKS:
            return ()
        if self.is_positive:
            return block_magnitudes(8)
        half = block_magnitudes(7)
        return (*half, *(-value for value in half))


@frozen
class Stored:
    """How a piece, its main value and its states are stored between steps.

    Args:
        stepped: dtype in which the piece is stepped, and in which states are kept that are not in `states`.
        param: the model's parameter.
        main: what is kept beside it: a main copy, or a remainder; None: the parameter is the value.
        states: state key to what is stored otherwise than it is stepped. The optimizer may lack the state.
    """

    stepped: torch.dtype
    param: StoredTensor
    main: StoredTensor | None
    states: Mapping[str, StoredTensor]
