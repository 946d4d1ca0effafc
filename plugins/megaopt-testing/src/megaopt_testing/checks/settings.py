"""Settings: refused when they cannot be, explained to users, and read by the optimizer."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import attrs

from megaopt_core import get_megatron_optimizer
from megaopt_core.config import OptimizerConfig
from megaopt_core.errors import MegaoptError, UnknownSettingError
from megaopt_core.registry import SettingInfo, get_registry
from megaopt_testing.trial import DEFAULT_SETTINGS, Trial, some

__all__ = [
    "check_settings_documented",
    "check_settings_used",
    "check_settings_validated",
    "impossible_values",
    "own_settings",
    "requires_settings",
]


def own_settings(optimizer: str) -> dict[str, SettingInfo]:
    """Return the settings that an optimizer's entry declares, by full name.

    Args:
        optimizer: registered name.
    """
    settings = get_registry().optimizer(optimizer).settings
    owners = get_registry().setting_owners()
    return {name: info for name, info in owners.items() if settings is not None and info.settings is settings}


def requires_settings(entry: Any) -> str | None:
    """Return why settings of an entry cannot be checked, None when they can.

    Args:
        entry: the optimizer's entry.
    """
    return "its entry declares no settings" if entry.settings is None else None


def impossible_values(value: Any) -> Iterator[tuple[Any, ...]]:
    """Yield sets of values of which at least one must be refused in the place of a default.

    Args:
        value: the default.
    """
    if isinstance(value, bool):
        yield ("perhaps",)
    elif isinstance(value, int):
        yield ("many",)
        yield -(10**9), 10**9, 0.5
    elif isinstance(value, float):
        yield ("much",)
        yield (math.nan,)
        yield -1e30, 1e30
    else:
        yield (object(),)


def check_settings_validated(optimizer: str, **settings: Any) -> None:
    """An unknown setting, a wrong type or a value out of range raises megaopt's errors at construction.

    Every numeric setting has to refuse NaN, text, and either very large or very negative numbers.

    Args:
        optimizer: registered name.
        **settings: fields of the configuration.

    Raises:
        ConformanceError: something that cannot be is accepted, or refused by another class of error.
    """
    trial = Trial(optimizer, settings)
    given = {**DEFAULT_SETTINGS, **settings}
    # A name alone says nothing: one that begins like a plugin's that is not installed is kept for that plugin.
    for prefix in get_registry().optimizer(optimizer).setting_prefixes or (optimizer,):
        _require_refused(trial, given, f"{prefix}_no_such_setting", (1,), UnknownSettingError)
    _require_refused(trial, given, "lr", (-1.0,), MegaoptError)
    for name, info in own_settings(optimizer).items():
        default = info.field.default
        if isinstance(default, attrs.Factory):  # type: ignore[arg-type]
            continue
        for values in impossible_values(default):
            _require_refused(trial, given, name, values, MegaoptError)


def _require_refused(
    trial: Trial, given: Mapping[str, Any], name: str, values: tuple[Any, ...], wanted: type[MegaoptError]
) -> None:
    for value in values:
        try:
            OptimizerConfig(**{**given, "optimizer": trial.optimizer, name: value})
        except wanted:
            return
        except Exception as error:  # noqa: BLE001 - the class of the error is what is checked
            trial.fail(
                f"{name}={value!r} raises {type(error).__name__} ({error}), not a {wanted.__name__}; use the "
                "validators of megaopt_core.config"
            )
    shown = " and ".join(repr(value) for value in values)
    trial.fail(
        f"OptimizerConfig accepts {name}={shown}; give the settings field a validator, such as those in "
        "megaopt_core.config"
    )


def check_settings_documented(optimizer: str, **settings: Any) -> None:
    """Every field of the settings class has `metadata={"help": ...}`, which `megaopt describe` shows.

    Args:
        optimizer: registered name.
        **settings: fields of the configuration.

    Raises:
        ConformanceError: a field has no help.
    """
    silent = [
        name
        for name, info in own_settings(optimizer).items()
        if not str(info.field.metadata.get("help", "")).strip()
    ]
    if silent:
        Trial(optimizer, settings).fail(
            f'settings without help: {some(silent)}. Write field(..., metadata={{"help": "what it does"}})'
        )


class _Recording(OptimizerConfig):
    """A configuration that notes which plugin settings are read."""

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("_"):
            self.__dict__.setdefault("_read", set()).add(name)
        return super().__getattr__(name)

    def settings[T](self, settings_cls: type[T]) -> T:
        owners = get_registry().setting_owners()
        names = {name for name, info in owners.items() if info.settings is settings_cls}
        self.__dict__.setdefault("_read", set()).update(names)
        return super().settings(settings_cls)


def check_settings_used(optimizer: str, **settings: Any) -> None:
    """Every setting of the entry is read while an optimizer is built: none is accepted and ignored.

    Args:
        optimizer: registered name.
        **settings: fields of the configuration.

    Raises:
        ConformanceError: a setting is never read.
    """
    trial = Trial(optimizer, settings)
    config = _Recording(**{**DEFAULT_SETTINGS, **settings, "optimizer": optimizer})
    # Plugins read copies of the configuration, which note it in the same set.
    read: set[str] = config.__dict__.setdefault("_read", set())
    get_megatron_optimizer(config, [trial.model()])
    ignored = sorted(set(own_settings(optimizer)) - read)
    if ignored:
        trial.fail(
            f"no build reads the settings {some(ignored)}, so they have no effect. Pass them on in "
            "config_to_kwargs, or remove them"
        )
