"""The configuration of a run: the core's fields, and whatever settings the installed plugins add."""

from __future__ import annotations

import copy
import inspect
import math
import os
from collections.abc import Mapping
from enum import Enum
from types import MappingProxyType
from typing import Any, Self

import torch

from megaopt_core.config._as_dataclass import DataclassFields, DataclassParams
from megaopt_core.config._dtypes import dtype_name
from megaopt_core.config._fields import CORE_FIELD_NAMES, CoreFields, core_field_info
from megaopt_core.config._plugin_settings import check_settings, read_setting, settings_of
from megaopt_core.config._strategy_flags import STRATEGY_FLAGS, with_one_strategy
from megaopt_core.errors import ConfigurationError, shown_value
from megaopt_core.registry._catalogue import TOOLS
from megaopt_core.registry._missing import import_distribution

__all__ = ["OptimizerConfig", "core_field_info", "require_config"]


class OptimizerConfig(CoreFields):
    """The configuration of a run.

    Core fields need no plugin. Any other name is a setting of a plugin, `{prefix}_{field}`: it is checked by the
    plugin's settings class. Settings of a plugin that is known but not installed are kept, survive `to_dict` and
    `from_dict`, and raise when they are read. Values are checked at construction and whenever one is assigned.

    Args:
        **settings: core fields and plugin settings, by name.

    Raises:
        ConfigurationError: a value is not allowed, or two values contradict each other.
        UnsupportedSettingError: a value asks for what megaopt does not do.
        UnknownSettingError: no core field and no plugin has a setting of this name; the message lists close ones.

    Example:
        >>> config = OptimizerConfig(lr=3e-4, min_lr=3e-5, bf16=True)
        >>> config.lr, config.weight_decay
        (0.0003, 0.01)
        >>> config.replace(lr=1e-3).lr
        0.001
        >>> OptimizerConfig(lr=-1.0)
        Traceback (most recent call last):
        megaopt_core.errors.ConfigurationError: lr=-1.0: must be a number of at least 0
    """

    _plugin_settings: dict[str, Any]

    __dataclass_fields__ = DataclassFields()
    __dataclass_params__ = DataclassParams()

    def __init__(self, /, *unnamed: Any, **settings: Any) -> None:
        if unnamed:
            advice = "name every setting, as in OptimizerConfig(lr=1e-3), or call OptimizerConfig.from_dict(mapping)"
            raise ConfigurationError.got("OptimizerConfig", unnamed[0], advice)
        settings = with_one_strategy(settings)
        core = CoreFields(**{name: value for name, value in settings.items() if name in CORE_FIELD_NAMES})
        plugin = check_settings(
            {name: value for name, value in settings.items() if name not in CORE_FIELD_NAMES}, core.optimizer
        )
        self.__dict__.update(vars(core), _plugin_settings=plugin)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise self._lacks(name)
        return read_setting(name, self._plugin_settings)

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            raise self._lacks(name)
        self.__dict__.update(vars(self.replace(**{name: value})))

    def _lacks(self, name: str) -> AttributeError:
        return AttributeError(
            f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self
        )

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"{name!r} cannot be deleted; assign its default instead", name=name, obj=self)

    @property
    def plugin_settings(self) -> Mapping[str, Any]:
        """The plugin settings that were given, by full name; a read-only view."""
        return MappingProxyType(self._plugin_settings)

    def settings[T](self, settings_cls: type[T]) -> T:
        """Return a plugin's settings, typed.

        Args:
            settings_cls: the settings class of an installed plugin's optimizer.

        Returns:
            An instance with what this configuration sets, and defaults.

        Raises:
            PluginError: no loaded plugin has this settings class.
        """
        return settings_of(settings_cls, self._plugin_settings)

    def replace(self, /, **changes: Any) -> Self:
        """Return a copy with some settings changed; this configuration stays as it is.

        `sharding` and the two `use_..._distributed_optimizer` are one setting: a change of one replaces the others.

        Args:
            **changes: core fields and plugin settings, by name.

        Raises:
            ConfigurationError: as at construction.
        """
        settings = {name: getattr(self, name) for name in CORE_FIELD_NAMES}
        one_setting = ("sharding", *STRATEGY_FLAGS)
        if any(name in changes for name in one_setting):
            for name in one_setting:
                del settings[name]
        return type(self)(**{**settings, **self._plugin_settings, **changes})

    def to_dict(self) -> dict[str, Any]:
        """Return every core field and every given plugin setting, ready for JSON or TOML-like formats.

        `timers` is left out, dtypes and infinity become strings, tuples become lists.

        Example:
            >>> OptimizerConfig(lr=0.1).to_dict()["params_dtype"]
            'float32'
        """
        core = {name: getattr(self, name) for name in CORE_FIELD_NAMES if name != "timers"}
        return {name: _plain(value) for name, value in {**core, **self._plugin_settings}.items()}

    @classmethod
    def from_dict(cls, settings: Mapping[str, Any]) -> Self:
        """Return the configuration that :meth:`to_dict` wrote.

        Args:
            settings: core fields and plugin settings, by name; it is not changed.

        Raises:
            ConfigurationError: as at construction.
        """
        names = list(settings) if isinstance(settings, Mapping) else [settings]
        wrong = [name for name in names if not isinstance(name, str)]
        if wrong or not isinstance(settings, Mapping):
            given = (
                f"the key {shown_value(wrong[0])}"
                if isinstance(settings, Mapping)
                else type(settings).__name__
            )
            raise ConfigurationError(
                f"from_dict: got {given}; give a mapping of names to values, as to_dict() returns",
                setting="settings",
                value=settings,
            )
        return cls(**settings)

    @classmethod
    def from_toml(cls, path: str | os.PathLike[str]) -> Self:
        """Read a TOML file whose keys are settings; its `[[overrides]]` tables are left to `megaopt_tools.RunFile`.

        Args:
            path: the file.

        Raises:
            ConfigFileError: the file cannot be read, or says something wrong; the message begins with file and line.
            PluginNotInstalledError: megaopt-tools, which reads files, is not installed.
        """
        config: Self = import_distribution(TOOLS, "OptimizerConfig.from_toml").read_config(path, cls)
        return config

    def __repr__(self) -> str:
        defaults = vars(CoreFields())
        core = {name: getattr(self, name) for name in CORE_FIELD_NAMES}
        changed = {
            name: value for name, value in core.items() if name == "optimizer" or value != defaults[name]
        }
        inside = ", ".join(
            f"{name}={value!r}" for name, value in {**changed, **self._plugin_settings}.items()
        )
        return f"{type(self).__name__}({inside})"

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        return vars(self) == vars(other)

    __hash__ = None  # type: ignore[assignment]

    def __copy__(self) -> Self:
        return _restore(type(self), {**vars(self), "_plugin_settings": dict(self._plugin_settings)})

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Timers belong to the run, not to the configuration: a copy shares them."""
        return _restore(
            type(self), {**vars(self), "_plugin_settings": copy.deepcopy(self._plugin_settings, memo)}
        )

    def __reduce__(self) -> tuple[Any, ...]:
        """Timers often cannot be pickled and mean nothing in another process."""
        return _restore, (type(self), {**vars(self), "timers": None})


def _restore[C: OptimizerConfig](cls: type[C], state: dict[str, Any]) -> C:
    """Make a configuration from what was checked before: the plugins of then may be missing now."""
    config = cls.__new__(cls)
    config.__dict__.update(vars(CoreFields()), **state)
    return config


def _plain(value: Any) -> Any:
    if isinstance(value, torch.dtype):
        return dtype_name(value)
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, float) and math.isinf(value):
        return str(value)
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value


def _signature() -> inspect.Signature:
    """Return what editors and documentation show: every core field by name, then plugin settings."""
    core = list(inspect.signature(CoreFields).parameters.values())
    plugin = inspect.Parameter("plugin_settings", inspect.Parameter.VAR_KEYWORD, annotation="Any")
    return inspect.Signature([*core, plugin], return_annotation="None")


OptimizerConfig.__signature__ = _signature()  # type: ignore[attr-defined]


def require_config(config: object) -> None:
    """Raise unless a configuration is one.

    Args:
        config: what a user gave.
    """
    if isinstance(config, OptimizerConfig):
        return
    if isinstance(config, Mapping):
        advice = "OptimizerConfig.from_dict(settings) makes one of a mapping"
    elif isinstance(config, type):
        advice = f"give an instance: {config.__name__}(lr=...)"
    else:
        advice = "the configuration comes first, then the model: get_megatron_optimizer(config, model)"
    shown = f"the class {config.__name__}" if isinstance(config, type) else type(config).__name__
    raise ConfigurationError.got("config", config, advice, shown=f"{shown}, not an OptimizerConfig")
