"""Which values a parameter group may hold: what overrides, users and loaded state write is checked as settings are."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs
import torch

from megaopt_core.config._validators import FINITE, TEXT, Rule, between, boolean, not_negative
from megaopt_core.errors import ConfigurationError, MegaoptError
from megaopt_core.registry._registry import get_registry

if TYPE_CHECKING:
    from megaopt_core.config._optimizer_config import OptimizerConfig
    from megaopt_core.plugin_api._entries import OptimizerEntry
    from megaopt_core.registry._setting_owners import SettingInfo

__all__ = ["Check", "GroupChecks", "group_checks", "wrong_settings"]

type Check = Callable[[Any], str | None]
"""Takes a value, returns what would be allowed in words; None: the value is."""

type GroupChecks = Mapping[str, Check]
"""Key of a group to its check; keys that are absent may hold anything."""

_OPTIONAL = ("lr", "max_lr", "min_lr", "start_wd", "end_wd")
_FACTORS = ("wd_mult", "lr_mult", "weight_decay", "initial_lr")
_NOT_NEGATIVE = ("eps", "momentum")
_CHOICES = ("foreach", "fused")


def group_checks(entry: OptimizerEntry | None, defaults: Mapping[str, Any]) -> GroupChecks:
    """Return the checks of one optimizer's groups.

    A key that the optimizer's settings class has is checked by its validator, `betas` by those of `beta1` and
    `beta2`; any other by the kind of the optimizer's own default.

    Args:
        entry: the optimizer's entry; None for one that no plugin describes.
        defaults: the optimizer's `defaults`.
    """
    checks: dict[str, Check] = {key: _by_default(key, value) for key, value in defaults.items()}
    owned = {} if entry is None else _owned_by(entry)
    checks |= {key: _by_validator(info) for key, info in owned.items() if key in defaults}
    betas: Any = defaults.get("betas")
    if _is_pair_of_rates(betas):
        each = [
            _by_validator(owned[key]) if (key := f"beta{number}") in owned else _rate
            for number in range(1, len(betas) + 1)
        ]
        checks["betas"] = _each(each)
    checks |= dict.fromkeys(_FACTORS, _not_negative)
    checks |= dict.fromkeys(_OPTIONAL, _optional(_not_negative))
    checks["clip_grad"] = _switch
    return checks


def wrong_settings(entry: OptimizerEntry, config: OptimizerConfig, given: Mapping[str, Any]) -> str | None:
    """Return what is wrong with constructor settings that differ from the configuration's; None when nothing is.

    Args:
        entry: the optimizer's entry.
        config: the run's configuration, whose other settings hold.
        given: names of settings without prefix to values; names that the settings class lacks are passed over.
    """
    owned = _owned_by(entry)
    by_class: dict[type, dict[str, Any]] = {}
    for key, value in given.items():
        if key in owned:
            by_class.setdefault(owned[key].settings, {})[str(owned[key].field.alias)] = value
    for settings, changes in by_class.items():
        try:
            attrs.evolve(config.settings(settings), **changes)  # type: ignore[misc]
        except ConfigurationError as error:
            return str(error)
        except (TypeError, ValueError) as error:
            return f"{changes}: {error}"
    return None


def _owned_by(entry: OptimizerEntry) -> dict[str, SettingInfo]:
    """Return name without prefix to setting; the entry's first prefix wins."""
    owners = get_registry().setting_owners()
    return {
        info.field.name: info
        for prefix in reversed(entry.setting_prefixes)
        for info in owners.values()
        if info.prefix == prefix
    }


def _by_validator(info: SettingInfo) -> Check:
    validator = info.field.validator
    if validator is None:
        return _anything

    def check(value: Any) -> str | None:
        value = value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value
        try:
            validator(info.settings(), info.field, value)
        except ConfigurationError as error:
            return str(error).partition(": ")[2] or str(error)
        except (MegaoptError, TypeError, ValueError) as error:
            return str(error)
        return None

    return check


def _by_default(key: str, default: Any) -> Check:
    if key in _CHOICES:
        return _optional(_switch)
    if isinstance(default, bool):
        return _switch
    if isinstance(default, (int, float)):
        if not math.isfinite(default):  # such as a bound that is none: `growth_rate=inf`
            return _anything
        return _not_negative if key in _NOT_NEGATIVE and default >= 0 else _by_rule(FINITE)
    return _by_rule(TEXT) if isinstance(default, str) else _anything


def _is_pair_of_rates(value: Any) -> bool:
    return isinstance(value, (tuple, list)) and bool(value) and all(_rate(each) is None for each in value)


def _number_in(value: Any) -> Any:
    """Return the number that a tensor of one element is, 0 where it is on an accelerator, which is not read."""
    if isinstance(value, torch.Tensor) and value.numel() == 1 and not value.is_complex():
        return float(value) if value.device.type == "cpu" else 0.0
    return value


def _by_rule(rule: Rule) -> Check:
    def check(value: Any) -> str | None:
        allowed = rule.refusal(_number_in(value))
        return None if allowed is None else f"must be {allowed}"

    return check


_not_negative = _by_rule(not_negative())
_rate = _by_rule(between(0.0, 1.0))
_switch = _by_rule(boolean())


def _anything(value: Any) -> str | None:
    return None


def _optional(check: Check) -> Check:
    def checked(value: Any) -> str | None:
        wrong = None if value is None else check(value)
        return None if wrong is None else f"{wrong}, or None"

    return checked


def _each(checks: Sequence[Check]) -> Check:
    def checked(value: Any) -> str | None:
        if not isinstance(value, (tuple, list)) or len(value) != len(checks):
            return f"must be {len(checks)} numbers"
        for number, (check, each) in enumerate(zip(checks, value, strict=True)):
            wrong = check(each)
            if wrong is not None:
                return f"entry {number} {wrong}"
        return None

    return checked
