"""State dicts that torch's functions rearranged: parameters by names of the model, in the groups of who loads them.

What else a group says, its settings, is still that of a group that was saved, whose `param_names` lie beside it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megaopt_core.errors import StateDictError
from megaopt_core.params._names import shown, without_wrappers

__all__ = ["names_of_listed", "require_told", "told_at"]


def names_of_listed(state_dict: Mapping[str, Any], called: Mapping[str, str]) -> list[str] | None:
    """Return the canonical names of parameters that a state dict lists by the names that they have in the model.

    Args:
        state_dict: a state dict of torch's schema.
        called: name in the model to canonical name.

    Returns:
        Them in the order of its groups, unknown ones as they are; None when it lists numbers, or nothing that is known.
    """
    listed = [index for group in state_dict["param_groups"] for index in group["params"]]
    found = [
        called.get(index, called.get(without_wrappers(index))) if isinstance(index, str) else None
        for index in listed
    ]
    if not any(found):
        return None
    return [name or str(index) for name, index in zip(found, listed, strict=True)]


def told_at(groups: Sequence[Mapping[str, Any]], names: Sequence[str]) -> list[int | None]:
    """Return for each parameter which group has its settings: the one that was saved with it.

    Args:
        groups: the groups of a state dict.
        names: of their parameters, in the same order.

    Returns:
        The position of each group; None where the settings were left out.
    """
    listed_in = [position for position, group in enumerate(groups) for _ in group["params"]]
    by_name = {name: at for at, group in enumerate(groups) for name in group.get("param_names", ())}
    if by_name.keys().isdisjoint(names):
        return list(listed_in)
    return [by_name.get(name) for name in names]


def require_told(groups: Sequence[Mapping[str, Any]], names: Sequence[str]) -> None:
    """Raise where a state dict has the states of parameters, but not who stepped them with which settings.

    Args:
        groups: the groups of a state dict.
        names: of their parameters, in the same order.

    Raises:
        StateDictError: it lacks the settings of a parameter.
    """
    lost = [name for name, at in zip(names, told_at(groups, names), strict=False) if at is None]
    if lost:
        raise StateDictError(
            f"the state dict lacks the settings of {shown(lost)}: the groups of this optimizer are not those that were "
            "saved, and torch's set_optimizer_state_dict() gives a group the settings of one saved group alone. Build "
            "with the overrides that were saved, or use save_checkpoint() and load_checkpoint(), or "
            "torch.distributed.checkpoint with checkpoint_state(); strict=False of load_state_dict() keeps the "
            "settings that are here",
            names=lost,
        )
