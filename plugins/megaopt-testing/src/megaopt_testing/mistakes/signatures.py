"""What the functions of plugins are called with, found out before they are called."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from megaopt_core.errors import PluginError
from megaopt_core.plugin_api import OptimizerEntry, ScheduleStyle

__all__ = ["check_signatures"]

_OF_CONFIG = ("config",)
_OF_SPEC = ("spec", "view")
_OF_POINT = ("point",)

_CALLED_WITH: Mapping[type, Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        OptimizerEntry: {
            "init_state_fn": ("optimizer", "config"),
            "config_to_kwargs": ("config", "model_chunks", "pg_collection"),
            "granularity_for": _OF_CONFIG,
            "accepts": _OF_SPEC,
            "fallback": _OF_CONFIG,
            "fallback_override": _OF_CONFIG,
            "step_cost": _OF_SPEC,
            "refuses_split": _OF_CONFIG,
            "refuses_peers": _OF_CONFIG,
            "mup": ("config", "mup_width_mult"),
            "agree": ("optimizer", "pg_collection"),
            "param_notes": ("optimizer",),
            "unused_settings": ("config", "specs"),
        },
        ScheduleStyle: {
            "learning_rate": _OF_POINT,
            "weight_decay": _OF_POINT,
            "check_learning_rate": _OF_POINT,
            "check_weight_decay": _OF_POINT,
        },
    }
)
"""Record to its functions and what each is given, by position."""


def check_signatures(whose: str, record: OptimizerEntry | ScheduleStyle) -> None:
    """Raise unless every function of a record can be called with what it will be given.

    Args:
        whose: whose functions they are, in words.
        record: what a plugin offers.

    Raises:
        PluginError: one is no function, or takes something else; a signature that cannot be read is believed.
    """
    for field, given in _CALLED_WITH[type(record)].items():
        function = getattr(record, field)
        if function is None or (field == "fallback" and isinstance(function, str)):
            continue
        called = f"it is called as {field}({', '.join(given)})"
        if not callable(function):
            raise PluginError(f"{whose}: {field} must be a function, got {type(function).__name__}; {called}")
        taken = _signature(function)
        if taken is not None and not _takes(taken, given):
            own = ", ".join(taken.parameters) or "nothing"
            raise PluginError(f"{whose}: the function given as {field} takes ({own}); {called}")


def _signature(function: Any) -> inspect.Signature | None:
    try:
        return inspect.signature(function)
    except (TypeError, ValueError):  # a builtin may have none
        return None


def _takes(signature: inspect.Signature, given: tuple[str, ...]) -> bool:
    try:
        signature.bind(*given)
    except TypeError:
        return False
    return True
