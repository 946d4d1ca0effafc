"""An inner optimizer with its precision policy and its pieces, as a step runner sees it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from megaopt_core.execution._exchanged_step import ExchangedStep
from megaopt_core.precision._policy import PrecisionPolicy
from megaopt_core.sharding._live_model import Piece

__all__ = ["InnerPart"]


class InnerPart(Protocol):
    """An inner optimizer, which keeps state, and its precision policy, over the pieces that a runner steps."""

    inner: torch.optim.Optimizer
    precision: PrecisionPolicy
    stepped: Sequence[torch.Tensor]
    split: ExchangedStep | None
    """The step in three parts, which keeps the state of whole tensors; None: `inner` steps."""

    @property
    def config(self) -> Any:
        """The run's configuration."""

    @property
    def pieces(self) -> Sequence[Piece]:
        """This rank's pieces; `stepped` has the tensor that is stepped for each."""
