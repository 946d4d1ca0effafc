"""Entry point of megaopt-muon: its hooks; torch is imported by the one that offers optimizers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from megaopt_core.plugin_api import Commands, hookimpl

if TYPE_CHECKING:
    from megaopt_core.plugin_api import OptimizerEntry

__all__ = ["megaopt_api", "megaopt_commands", "megaopt_optimizer_entries"]

megaopt_api = "1"


@hookimpl
def megaopt_optimizer_entries() -> Mapping[str, OptimizerEntry]:
    """Offer `muon` and `adaptive_muon`."""
    from megaopt_muon.entries import optimizer_entries

    return optimizer_entries()


@hookimpl
def megaopt_commands(commands: Commands) -> None:
    """Add `calibrate`."""
    from megaopt_muon.choice.calibrate_command import add_calibrate_command

    add_calibrate_command(commands)
