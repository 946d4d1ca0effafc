"""Entry point of megaopt-checkpoint: its commands, states that ranks share, and the routing of a checkpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megaopt_core.plugin_api import Commands, hookimpl

if TYPE_CHECKING:  # they need torch, and adding commands does not
    from megaopt_core.optimizers import MegatronOptimizer
    from megaopt_core.plugin_api import SharedState, StoredRouting

__all__ = ["megaopt_api", "megaopt_commands", "megaopt_shared_state", "megaopt_stored_routing"]

megaopt_api = "1"


@hookimpl
def megaopt_commands(commands: Commands) -> None:
    """Add `verify-checkpoint` and `convert`."""
    from megaopt_checkpoint import convert_command, verify_command

    verify_command.add_command(commands)
    convert_command.add_command(commands)


@hookimpl
def megaopt_shared_state(optimizer: MegatronOptimizer) -> SharedState:
    """Return how state dicts show the states that the ranks of an optimizer share."""
    from megaopt_checkpoint.state_dicts.shared import SharedStateDict

    return SharedStateDict(optimizer)


@hookimpl
def megaopt_stored_routing(path: str) -> StoredRouting | None:
    """Return the routing of a checkpoint; None where there is nothing."""
    from megaopt_checkpoint.routing import stored_routing

    return stored_routing(path)
