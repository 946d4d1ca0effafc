"""The precision policy that a configuration asks for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from megaopt_core.config._dtypes import parse_dtype, shown
from megaopt_core.errors import PluginError, UnsupportedSettingError
from megaopt_core.precision._policy import PrecisionPolicy
from megaopt_core.registry._catalogue import PRECISION_AWARE
from megaopt_core.registry._registry import get_registry

if TYPE_CHECKING:
    from megaopt_core.config._optimizer_config import OptimizerConfig
    from megaopt_core.plugin_api._entries import OptimizerEntry

__all__ = ["precision_policy", "require_possible"]


def precision_policy(config: OptimizerConfig) -> type[PrecisionPolicy]:
    """Return the class of the policies that a configuration asks for.

    Args:
        config: the run's configuration.

    Raises:
        PluginNotInstalledError: it comes with a plugin that is not installed, or is blocked.
        BrokenPluginError: it should come from a plugin that failed to load.
        UnknownNameError: nobody offers a policy of this name.
        PluginError: a plugin offers something else under this name.
    """
    if config.precision is not None:
        name = config.precision
    elif config.use_precision_aware_optimizer:
        name = PRECISION_AWARE
    else:
        name = "main_params" if config.fp16 or config.bf16 else "fp32"
    registry = get_registry()
    policy = registry.precision_policy(name)
    if not issubclass(policy, PrecisionPolicy):
        owner = registry.owner("precision", name)
        raise PluginError(f"precision policy {name!r} of {owner}: {policy.__name__} is no PrecisionPolicy")
    return policy


def require_possible(config: OptimizerConfig, entries: Mapping[str, OptimizerEntry]) -> None:
    """Raise unless every precision setting does something with the optimizers in use.

    Args:
        config: the run's configuration.
        entries: registered name to entry, of every optimizer in use.

    Raises:
        UnsupportedSettingError: a setting asks for what cannot be done, or would be ignored.
        PluginNotInstalledError: the policy that is asked for comes with a plugin that is not installed.
    """
    if config.loss_scale is not None and not (config.fp16 or config.bf16):
        raise _unsupported(config, "loss_scale", "needs fp16=True or bf16=True; fp32 losses are not scaled")
    if not config.use_precision_aware_optimizer:
        for name in {name for entry in entries.values() for name in entry.state_dtype_settings.values()}:
            if parse_dtype(getattr(config, name)) not in (None, torch.float32):
                raise _unsupported(
                    config, name, "must be 'float32' unless use_precision_aware_optimizer=True"
                )
    precision_policy(config).require_possible(config, entries)


def _unsupported(config: OptimizerConfig, setting: str, why: str) -> UnsupportedSettingError:
    value = getattr(config, setting)
    return UnsupportedSettingError.of(setting, value, why, shown=shown(value))
