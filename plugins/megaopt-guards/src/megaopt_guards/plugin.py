"""The plugin: observers of every optimizer's steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from megaopt_core import hookimpl

if TYPE_CHECKING:
    from megaopt_core import MegatronOptimizer
    from megaopt_core.plugin_api import StepObserver

__all__ = ["megaopt_api", "megaopt_step_observers"]

megaopt_api = "1"


@hookimpl
def megaopt_step_observers(optimizer: MegatronOptimizer) -> Sequence[StepObserver]:
    """Return what compares ranks, and finds foreign writes, new wrappers and double clipping.

    Args:
        optimizer: what is stepped.
    """
    from megaopt_core.parallel import takes_part
    from megaopt_guards.double_clipping import DoubleClipping
    from megaopt_guards.foreign_writes import ForeignWrites
    from megaopt_guards.ranks_compared import RanksCompared
    from megaopt_guards.wrappers import WrappersWatched

    watched = any(each.watched_model.chunks for each in (optimizer, *optimizer.children))
    always = [*([WrappersWatched(optimizer)] if watched else []), DoubleClipping()]
    if takes_part(optimizer.process_groups):
        ranks = RanksCompared(optimizer)
        return [ranks, ForeignWrites(optimizer, ranks.compare_written), *always]
    keeps = any(part.writes.kept or part.writes.is_together for part in optimizer.parts)
    return [*([ForeignWrites(optimizer)] if keeps else []), *always]
