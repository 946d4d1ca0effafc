"""Plugins that fail while a model is routed: left out with a warning, or an error where something depends on them."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch

from megaopt_core.config._optimizer_config import OptimizerConfig
from megaopt_core.errors import BrokenPluginWarning, OverrideError, PluginHookError, warn_user
from megaopt_core.params._specs import Granularity
from megaopt_core.registry._registry import PluginRegistry
from megaopt_core.routing._overrides.matching import OverrideSet

__all__ = ["add_plugin_overrides", "raise_or_warn"]

_HOOK = "megaopt_param_overrides"


def add_plugin_overrides(
    overrides: OverrideSet,
    config: OptimizerConfig,
    chunks: Sequence[torch.nn.Module],
    registry: PluginRegistry,
) -> list[PluginHookError]:
    """Add what plugins override; of a plugin that fails, nothing.

    Args:
        overrides: the run's overrides.
        config: the run's configuration; every plugin gets a copy.
        chunks: the model chunks.
        registry: the plugins.

    Returns:
        An error for every plugin that raised, or whose overrides are none.
    """
    failed: list[PluginHookError] = []
    found = registry.call_each(_HOOK, failed=failed, config=config, model_chunks=chunks)
    for plugin, result in found:
        try:
            overrides.add(result or {}, f"plugin {plugin.name}")
        except OverrideError as error:
            failed.append(plugin.failed_in(_HOOK, f"it returned {error}"))
    return failed


def raise_or_warn(
    readers: Sequence[PluginHookError],
    overriders: Sequence[PluginHookError],
    config: OptimizerConfig,
    used: Collection[str],
    registry: PluginRegistry,
) -> None:
    """Raise where something in use depends on a plugin that failed, else warn that it is left out.

    What parameters are matters to optimizers of whole tensors. What a plugin overrides matters to what that plugin
    brings itself.

    Args:
        readers: errors of plugins that say what parameters are.
        overriders: errors of plugins that override settings.
        config: the run's configuration.
        used: the optimizers that step a parameter.
        registry: the plugins.

    Raises:
        PluginHookError: something depends on it.
    """
    asked = {config.optimizer, *used}
    brings = {registry.owner("optimizer", name).name for name in asked}
    brings.add(registry.owner("strategy", config.sharding or "replicated").name)
    whole = any(registry.optimizer(name).granularity is not Granularity.ELEMENT for name in asked)
    for error in (*readers, *overriders):
        if error.plugin in brings or (whole and error in readers):
            raise error
        warn_user(
            f"{error}; its answer is ignored, because nothing in use depends on it",
            BrokenPluginWarning,
        )
