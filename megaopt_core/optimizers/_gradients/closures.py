"""Closures that compute the loss of a step."""

from __future__ import annotations

import torch

from megaopt_core.errors import ConfigurationError

__all__ = ["require_closure"]


def require_closure(closure: object) -> None:
    """Raise unless what a step is given can be called, as torch's `step(closure)` calls it.

    Args:
        closure: what a user gave.

    Raises:
        ConfigurationError: it is a loss, or anything else that is no function.
    """
    if callable(closure):
        return
    what = (
        "a loss: call loss.backward() first, then step()"
        if isinstance(closure, torch.Tensor)
        else "no function"
    )
    shown = f"{type(closure).__name__}, which is {what}"
    advice = "a closure takes no arguments and returns the loss"
    raise ConfigurationError.got("closure", closure, advice, shown=shown)
