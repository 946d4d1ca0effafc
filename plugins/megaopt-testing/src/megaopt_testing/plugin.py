"""Entry point of megaopt-testing: the commands that it adds to megaopt, and two strategies for tests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from megaopt_core.plugin_api import Commands, hookimpl

if TYPE_CHECKING:
    from megaopt_core.sharding import ShardingStrategy

__all__ = ["megaopt_api", "megaopt_commands", "megaopt_sharding_strategies"]

megaopt_api = "1"


@hookimpl
def megaopt_commands(commands: Commands) -> None:
    """Add `check-plugin` and `new-plugin`."""
    from megaopt_testing import check_plugin_command, new_plugin_command

    check_plugin_command.add_command(commands)
    new_plugin_command.add_command(commands)


@hookimpl
def megaopt_sharding_strategies() -> Mapping[str, ShardingStrategy]:
    """Offer `kit_rows` and `kit_owners`, which checks share work out with."""
    from megaopt_testing.strategies import Owners, Rows

    return {"kit_rows": Rows(), "kit_owners": Owners()}
