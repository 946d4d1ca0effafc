"""Whether a class's first steps are those of an optimizer that everybody knows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from megaopt_bridge.cutting import Shape
from megaopt_bridge.trials import Trial, start

__all__ = ["first_steps_of"]

_STEPS = 3
_LR = 0.01
_WELL_KNOWN: tuple[tuple[type[torch.optim.Optimizer], dict[str, Any]], ...] = (
    (torch.optim.AdamW, {"weight_decay": 0.0}),
    (torch.optim.SGD, {}),
    (torch.optim.SGD, {"momentum": 0.9}),
)


def first_steps_of(
    cls: type[torch.optim.Optimizer], kwargs: Mapping[str, Any], shapes: Sequence[Shape]
) -> str | None:
    """Return `"torch.optim:Class"` of the optimizer whose first steps a class shares, None where it has its own.

    Three steps without weight decay, on gradients of ordinary size; a difference below a thousandth is rounding.

    Args:
        cls: the class.
        kwargs: constructor arguments, without the parameters.
        shapes: of tensors that it takes; one that is stepped so is enough.

    Example:
        >>> first_steps_of(torch.optim.NAdam, {"lr": 0.01}, [(7,)]) is None
        True
        >>> first_steps_of(torch.optim.Adam, {"lr": 0.01}, [(7,)])
        'torch.optim:AdamW'
    """
    usual = {"lr": _LR, "weight_decay": 0.0}
    ours = Trial(cls, {name: usual.get(name, value) for name, value in kwargs.items()}, {})
    for known, settings in _WELL_KNOWN:
        theirs = Trial(known, {"lr": _LR, **settings}, {})
        for shape in shapes:
            first, got, expected = start(shape, 0), _stepped(ours, shape), _stepped(theirs, shape)
            if (got - expected).norm() <= 1e-3 * (expected - first).norm():
                return f"torch.optim:{known.__name__}"
    return None


def _stepped(trial: Trial, shape: Shape) -> torch.Tensor:
    def grads(step: int) -> list[list[torch.Tensor]]:
        return [[start(shape, 100 + step)]]

    return trial.run([[start(shape, 0)]], grads, _STEPS, rates=(1.0,)).params[0]
