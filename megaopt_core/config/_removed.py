"""Arguments that builders of other trainers took and that say here what they want in another way."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megaopt_core.errors import ConfigurationError

__all__ = ["require_current"]

_BY_NAME = 'ParamKey(name="*.gate.*")'
_BY_FUNCTION = 'ParamKey(with_name_predicate=ParamWithNamePredicate("mine", lambda param, name: ...))'
_REMOVED = {
    "no_weight_decay_cond": "wd_mult",
    "scale_lr_cond": "max_lr",
    "lr_mult": "max_lr",
}
_VALUES = {"wd_mult": "0.0", "max_lr": "1e-4"}


def require_current(given: Mapping[str, Any]) -> None:
    """Raise for an argument that is no longer there, and say what replaces it.

    Args:
        given: arguments by name; those that never were removed are somebody else's to judge.

    Raises:
        ConfigurationError: one of them has been removed.

    Example:
        >>> require_current({"no_weight_decay_cond": lambda name, param: param.dim() == 1})
        Traceback (most recent call last):
        megaopt_core.errors.ConfigurationError: no_weight_decay_cond has been removed: ...
    """
    for name in given:
        if name in _REMOVED:
            key = _REMOVED[name]
            raise ConfigurationError(
                f"{name} has been removed: an override says it. "
                f"Add {{{_BY_NAME}: {{{key!r}: {_VALUES[key]}}}}} to those of "
                f"get_standard_config_overrides(config), or with a function {{{_BY_FUNCTION}: ...}}",
                setting=name,
                value=given[name],
            )
