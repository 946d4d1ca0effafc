"""What the report says of the parameters that a bridged class steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch

from megaopt_bridge.probing import Probe
from megaopt_bridge.recipe import Recipe

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["param_notes"]


def param_notes(
    recipe: Recipe, found: Probe, *, decays: bool
) -> Callable[[torch.optim.Optimizer], Mapping[str, str]] | None:
    """Return what notes of every parameter what its class does not do; None: there is nothing to note.

    Args:
        recipe: what no trial has shown.
        found: what a trial has shown.
        decays: the constructor has an argument for weight decay.
    """
    unread = found.unread
    always = list(_of_all(recipe, found, unread, decays=decays))
    undecayed = "weight_decay" in unread and not decays
    if not always and not undecayed:
        return None

    def notes(inner: torch.optim.Optimizer) -> dict[str, str]:
        return {
            param.param_info.name: "; ".join(said)
            for group in inner.param_groups
            for param in group["params"]
            if (said := [*always, *([_UNDECAYED] if undecayed and group.get("weight_decay") else [])])
        }

    return notes


_UNDECAYED = "the weight decay of its group changed nothing in a trial: its class has no argument for it"


def _of_all(recipe: Recipe, found: Probe, unread: frozenset[str], *, decays: bool) -> Iterator[str]:
    if "bit_exact_resume" in recipe.fails:
        yield f"does not resume exactly: {recipe.fails['bit_exact_resume']}"
    elif not found.resumes:
        yield "does not resume exactly: its class keeps something that is neither in its state nor in its groups"
    if "lr" in unread:
        yield "the learning rate of its group changed nothing in a trial: no schedule and no override of it may act"
    if "weight_decay" in unread and decays:
        yield "the weight decay of its group changed nothing in a trial: its class has the configuration's, if any"
