"""What the classes of optimizers check alike: arguments of constructors, gradients, and which decay may be cautious."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from megaopt_core.errors import ConfigurationError, GradientError

__all__ = ["dense_gradient", "require_argument", "require_decoupled_if_cautious"]


def require_argument(holds: bool, name: str, value: Any, allowed: str) -> None:
    """Raise unless a condition on an argument holds.

    Args:
        holds: the condition.
        name: of the argument.
        value: that was given.
        allowed: in words.

    Raises:
        ConfigurationError: it does not (a `ValueError`).

    Example:
        >>> require_argument(-1.0 >= 0, "lr", -1.0, "at least 0")
        Traceback (most recent call last):
        megaopt_core.errors.ConfigurationError: lr=-1.0: must be at least 0
    """
    if not holds:
        raise ConfigurationError.of(name, value, f"must be {allowed}")


def dense_gradient(optimizer: str, param: torch.Tensor) -> torch.Tensor:
    """Return a parameter's gradient, if it is dense and real.

    Args:
        optimizer: what the error calls the optimizer.
        param: the tensor that is stepped; it has a gradient.

    Raises:
        GradientError: the gradient is sparse or complex; the error names the parameter.
    """
    grad = param.grad
    assert grad is not None  # noqa: S101 - filtered by the caller
    if grad.is_sparse or grad.is_complex():
        name = getattr(getattr(param, "param_info", None), "name", f"of shape {tuple(param.shape)}")
        kind = "sparse" if grad.is_sparse else "complex"
        raise GradientError(f"{optimizer} cannot use the {kind} gradient of parameter {name}", names=(name,))
    return grad


def require_decoupled_if_cautious(
    group: Mapping[str, Any], is_decoupled: bool, otherwise: str, advice: str
) -> None:
    """Raise for a group whose decay is cautious and added to the gradient: there is no update to compare with then.

    Args:
        group: a group of an optimizer, with `cautious_weight_decay`.
        is_decoupled: weights are decayed beside their update.
        otherwise: the setting by which they are not.
        advice: what to use.

    Raises:
        ConfigurationError: the group cannot be.

    Example:
        >>> group = {"cautious_weight_decay": True}
        >>> require_decoupled_if_cautious(group, False, "weight_decay_method='l2'", "another method")
        Traceback (most recent call last):
        megaopt_core.errors.ConfigurationError: cautious_weight_decay=True: chooses the weights that shrink, but with \
weight_decay_method='l2' decay is added to the gradient; use another method
    """
    if group["cautious_weight_decay"] and not is_decoupled:
        raise ConfigurationError.of(
            "cautious_weight_decay",
            value=True,
            why=f"chooses the weights that shrink, but with {otherwise} decay is added to the "
            f"gradient; use {advice}",
        )
