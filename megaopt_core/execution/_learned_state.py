"""The state of an optimizer that nobody has told: a plugin learns it, or an entry of its class declares it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from megaopt_core.errors import PluginError
from megaopt_core.registry._catalogue import STATE_LEARNER
from megaopt_core.registry._registry import get_registry

if TYPE_CHECKING:
    from megaopt_core.plugin_api._entries import InitState

__all__ = ["learned_state"]


def learned_state(inner: torch.optim.Optimizer) -> InitState:
    """Return what makes state of the keys, shapes and dtypes that an optimizer's first step will make.

    Args:
        inner: an optimizer that has not stepped yet.

    Raises:
        PluginNotInstalledError: no plugin learns it, and no entry describes the class.
    """
    registry, cls = get_registry(), type(inner)
    for _, make in registry.call_each("megaopt_learn_state", optimizer=inner):
        learned: InitState = make
        return learned
    for entry in registry.optimizers().values():
        told = entry.init_state_fn or entry.state
        if told is not None and entry.optimizer_cls in (cls, f"{cls.__module__}:{cls.__qualname__}"):
            return told
    what = f"learning the state of {cls.__name__}, which neither init_state_fn nor its entry's state tells,"
    absent = registry.absent_plugin(what, cls.__name__, STATE_LEARNER)
    raise absent or PluginError(f"{what} is offered by no plugin, though {STATE_LEARNER} is installed")
