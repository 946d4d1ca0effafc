"""What a runner steps: an inner optimizer with what belongs to it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from megaopt_core.execution._exchanged_step import ExchangedStep
from megaopt_core.precision._policy import PrecisionPolicy
from megaopt_core.sharding._live_model import Piece

__all__ = ["InnerPart"]


class InnerPart(Protocol):
    """What a runner steps: an inner optimizer, which keeps state, and its precision policy, over this rank's pieces."""

    inner: torch.optim.Optimizer
    precision: PrecisionPolicy
    stepped: Sequence[torch.Tensor]
    split: ExchangedStep | None
    """What steps in three parts, and keeps the state of whole tensors; None: `inner` steps."""

    @property
    def config(self) -> Any:
        """The run's configuration."""

    @property
    def pieces(self) -> Sequence[Piece]:
        """This rank's pieces; `stepped` has the tensor that is stepped for each."""
