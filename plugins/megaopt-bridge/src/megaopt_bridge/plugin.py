"""Entry point of megaopt-bridge: what it offers to megaopt."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megaopt_core import hookimpl

if TYPE_CHECKING:
    from megaopt_core import OptimizerEntry

__all__ = ["megaopt_api", "megaopt_resolve_optimizer"]

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
