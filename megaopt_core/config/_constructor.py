"""Constructor arguments of an entry's optimizer, read from the configuration."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs
import torch

from megaopt_core.errors import ConfigurationError, PluginError, UnknownSettingError
from megaopt_core.plugin_api._entries import OptimizerEntry

if TYPE_CHECKING:
    from megaopt_core.config._optimizer_config import OptimizerConfig
    from megaopt_core.parallel._groups import ProcessGroupCollection

__all__ = ["constructor_defaults", "constructor_kwargs", "constructor_parameters"]

_CORE_FIELDS = ("lr", "weight_decay", "decoupled_weight_decay", "cautious_weight_decay")


def constructor_parameters(optimizer_cls: type[torch.optim.Optimizer]) -> dict[str, inspect.Parameter]:
    """Return the named constructor parameters but `self` and `params`.

    Args:
        optimizer_cls: the class.
    """
    parameters = inspect.signature(optimizer_cls).parameters.values()
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return {parameter.name: parameter for parameter in list(parameters)[1:] if parameter.kind in named}


def _matched_kwargs(entry: OptimizerEntry, config: OptimizerConfig) -> dict[str, Any]:
    kwargs: dict[str, Any] = {}
    parameters = constructor_parameters(entry.load_class())
    for name, parameter in parameters.items():
        for prefix in entry.setting_prefixes:
            try:
                kwargs[name] = getattr(config, f"{prefix}_{name}")
                break
            except UnknownSettingError:
                continue
        else:
            if name in _CORE_FIELDS:
                value = getattr(config, name)
                if value is not None or parameter.default is inspect.Parameter.empty:
                    kwargs[name] = value
    _refuse_unconsumed(entry, parameters)
    return kwargs


def _refuse_unconsumed(entry: OptimizerEntry, parameters: Mapping[str, inspect.Parameter]) -> None:
    if entry.settings is None or not entry.setting_prefixes:
        return
    for setting in attrs.fields(entry.settings):
        if setting.name not in parameters:
            full = f"{entry.setting_prefixes[0]}_{setting.name}"
            raise PluginError(
                f"setting {full!r} is declared, but {entry.load_class().__name__} has no constructor parameter "
                f"{setting.name!r}; give the entry a config_to_kwargs that consumes it"
            )


def constructor_kwargs(
    entry: OptimizerEntry,
    config: OptimizerConfig,
    model_chunks: Sequence[torch.nn.Module] = (),
    pg_collection: ProcessGroupCollection | None = None,
    settings: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the constructor arguments, `params` left out.

    Args:
        entry: the optimizer's entry.
        config: the run's configuration.
        model_chunks: the model chunks, for entries that look at the model.
        pg_collection: the process groups, for entries that communicate.
        settings: constructor settings of one child that differ from the configuration's.

    Raises:
        PluginError: the entry declares a setting that nothing consumes.
        ConfigurationError: a learning rate is needed and none is configured.
    """
    if entry.config_to_kwargs is None:
        kwargs = _matched_kwargs(entry, config)
    else:
        # A copy: what a plugin sets on it is its own affair.
        kwargs = dict(entry.config_to_kwargs(copy.deepcopy(config), model_chunks, pg_collection))
    kwargs.update(settings or {})
    if kwargs.get("lr", 0.0) is None:
        parameter = constructor_parameters(entry.load_class())["lr"]
        if parameter.default is inspect.Parameter.empty or parameter.default is None:
            raise ConfigurationError(
                f"{entry.load_class().__name__} needs a learning rate: set lr=...", setting="lr", value=None
            )
        del kwargs["lr"]
    return kwargs


def constructor_defaults(entry: OptimizerEntry, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the optimizer's `defaults`: the keys that it keeps per group.

    Args:
        entry: the optimizer's entry.
        kwargs: constructor arguments.
    """
    probe = torch.nn.Parameter(torch.zeros(2, 2))
    return dict(entry.load_class()([probe], **kwargs).defaults)
