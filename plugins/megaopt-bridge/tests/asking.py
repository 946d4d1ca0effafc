"""An optimizer class whose arguments say by their annotations of what kind they are."""

from collections.abc import Sequence
from enum import StrEnum
from typing import Optional

import torch
from torch.optim.optimizer import ParamsT


class Mode(StrEnum):
    """How to step."""

    FAST = "fast"
    EXACT = "exact"


class Asks(torch.optim.SGD):
    """Has arguments without a default that says of what kind they are, and one of a few texts."""

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-2,
        *,
        betas: tuple[float, float] | None = None,
        sizes: tuple[int, ...] | None = None,
        drop: Optional[tuple] = None,  # noqa: UP045 - as others still write it
        names: list[str] | None = None,
        either: float | Sequence[float] | None = None,
        mode: Mode = Mode.FAST,
        other: Mode | None = None,
    ) -> None:
        super().__init__(params, lr)
        self.given = {
            "betas": betas,
            "sizes": sizes,
            "drop": drop,
            "names": names,
            "either": either,
            "mode": mode,
            "other": other,
        }
