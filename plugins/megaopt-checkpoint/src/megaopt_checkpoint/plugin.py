"""Entry point of megaopt-checkpoint: the commands that it adds to megaopt, and the routing of a checkpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megaopt_core.plugin_api import Commands, hookimpl

if TYPE_CHECKING:  # it needs torch, and adding commands does not
    from megaopt_core.plugin_api import StoredRouting

__all__ = ["megaopt_api", "megaopt_commands", "megaopt_stored_routing"]

megaopt_api = "1"


@hookimpl
def megaopt_commands(commands: Commands) -> None:
    """Add `verify-checkpoint` and `convert`."""
    from megaopt_checkpoint import convert_command, verify_command

    verify_command.add_command(commands)
    convert_command.add_command(commands)


@hookimpl
def megaopt_stored_routing(path: str) -> StoredRouting | None:
    """Return the routing of a checkpoint; None where there is nothing."""
    from megaopt_checkpoint.routing import stored_routing

    return stored_routing(path)
