"""The one learning rate that a training log shows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megaopt_core.errors import ConfigurationError

__all__ = ["get_canonical_lr_for_logging"]


def get_canonical_lr_for_logging(param_groups: Sequence[Mapping[str, Any]]) -> float | None:
    """Return the learning rate of the first group whose learning rate no override touches.

    Args:
        param_groups: an optimizer's groups; one without the key `default_config` is passed over, one without
            parameters is not.

    Returns:
        Its `lr`, read from a tensor where it is one; None where no group is marked so, or the first has no `lr`.

    Raises:
        ConfigurationError: these are no parameter groups.

    Example:
        >>> get_canonical_lr_for_logging(
        ...     [{"lr": 0.1, "default_config": False}, {"lr": 0.2, "default_config": True}]
        ... )
        0.2
    """
    if not isinstance(param_groups, Sequence) or not all(
        isinstance(group, Mapping) for group in param_groups
    ):
        raise ConfigurationError.got(
            "param_groups", param_groups, "give optimizer.param_groups, a list of groups"
        )
    for group in param_groups:
        if group.get("default_config", False):
            return None if group.get("lr") is None else float(group["lr"])
    return None
