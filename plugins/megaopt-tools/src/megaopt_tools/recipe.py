"""What is to be trained, and how: one record that says it all."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib.resources import files
from typing import Any

from attrs import field, frozen

from megaopt_tools.shape import DEFAULT_SHAPE, Shape

__all__ = ["Recipe", "Tuned", "tuned"]


@frozen
class Tuned:
    """What a grid search found for an optimizer.

    Args:
        lr: the best learning rate.
        settings: the settings that it was found with.
    """

    lr: float | None = None
    settings: Mapping[str, Any] = field(factory=dict)


def tuned(optimizer: str) -> Tuned:
    """Return what the grid search found for an optimizer; nothing for those that it did not include.

    Args:
        optimizer: a registered name.
    """
    text = files("megaopt_tools").joinpath("learning_rates.json").read_text(encoding="utf-8")
    found = json.loads(text)["optimizers"].get(optimizer)
    return Tuned() if found is None else Tuned(found["lr"], found["settings"])


@frozen
class Recipe:
    """A training run; two runs of the same recipe on the same text give the same bits.

    Args:
        optimizer: a registered name.
        lr: peak learning rate; None: the optimizer's own default.
        settings: further fields of the configuration.
        steps: how many steps to take.
        batch_size: windows in a batch.
        context: bytes in a window.
        schedule: the style by which the learning rate falls.
        warmup: steps in which it rises; a tenth of all when it is not given.
        seed: of weights and batches.
        shape: of the model.
    """

    optimizer: str
    lr: float | None = None
    settings: Mapping[str, Any] = field(factory=dict)
    steps: int = 250
    batch_size: int = 16
    context: int = 128
    schedule: str = "cosine"
    warmup: int = field()
    seed: int = 0
    shape: Shape = DEFAULT_SHAPE

    @warmup.default
    def _tenth(self) -> int:
        return self.steps // 10
