"""Saves by name refuse names that mean other tensors on other ranks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from megaopt_core.errors import CheckpointError
from megaopt_core.params._parts import is_marked_expert
from megaopt_core.routing._own_names import stages_of_names, wrong_names

if TYPE_CHECKING:
    from megaopt_core.state._protocol import NamedState
    from megaopt_core.state._ranks import Ranks

__all__ = ["require_own_names"]


def require_own_names(optimizer: NamedState | None, names: Iterable[str], ranks: Ranks) -> None:
    """Raise where ranks of a pipeline or of an expert group have one name for different tensors: a collective.

    Args:
        optimizer: knows where this rank stands; None, or wrapped by hand: nobody does.
        names: of this rank's tensors.
        ranks: who saves.

    Raises:
        CheckpointError: a name means several tensors.
    """
    routing, stages = None if optimizer is None else optimizer.routing, dict[str, list[int]]()
    if optimizer is not None and routing is not None:
        shared = {name for name, entry in routing.params.items() if entry.shared}
        experts = [name for param, name in optimizer.names.items() if is_marked_expert(param)]
        stages = stages_of_names(set(names) - shared, experts, routing.axes, routing.rank)
    wrong = wrong_names(ranks.gather_different(stages))
    if wrong is not None:
        raise CheckpointError(wrong)
