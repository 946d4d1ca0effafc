"""Entry point of megaopt-bridge: what it offers to megaopt."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megaopt_core import hookimpl

if TYPE_CHECKING:
    import torch

    from megaopt_core import OptimizerEntry
    from megaopt_core.plugin_api import InitState

__all__ = ["megaopt_api", "megaopt_learn_state", "megaopt_resolve_optimizer"]

megaopt_api = "1"


@hookimpl
def megaopt_resolve_optimizer(name: str) -> OptimizerEntry | None:
    """Offer every optimizer class that `source:Class` names.

    Args:
        name: what a user wrote; anything without a colon is left to others.
    """
    if ":" not in name:
        return None
    from megaopt_bridge.entry import bridged_entry

    return bridged_entry(name)


@hookimpl
def megaopt_learn_state(optimizer: torch.optim.Optimizer) -> InitState:
    """Learn the state of any class by a step of a copy.

    Args:
        optimizer: has not stepped yet.
    """
    from megaopt_bridge.initial_state import learn_state

    return learn_state
