"""What a state dict of torch's schema lists: the names of its parameters, and what its groups say of them.

torch's functions rearrange state dicts: parameters then go by names of the model, in the groups of who loads them. What
else a group says, its settings, is still that of a group that was saved, whose `param_names` lie beside it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from megaopt_core.errors import StateDictError
from megaopt_core.params._names import shown, without_wrappers
from megaopt_core.precision._policy import MAIN_PARAM
from megaopt_core.state._origin import ROUTED, STEPPED, stored_view

if TYPE_CHECKING:
    from megaopt_core.state._protocol import StatefulOptimizer

__all__ = [
    "fresh_in",
    "is_left_out",
    "is_written",
    "names_in",
    "names_of",
    "origin_in",
    "origin_of",
    "require_told",
    "told_at",
]


def names_of(optimizer: StatefulOptimizer, state_dict: Mapping[str, Any]) -> list[str]:
    """Return the canonical names of a state dict's parameters in the order of its groups.

    Args:
        optimizer: what will load it.
        state_dict: what an optimizer of torch, or one of ours, returned; or what torch's functions made of that.

    Raises:
        StateDictError: it is no such thing, or has no names and other groups.
    """
    names = names_in(state_dict)
    listed = _names_of_listed(state_dict, optimizer.watched_model.called(optimizer.names)) or names
    return _by_position(optimizer, state_dict) if listed is None else listed


def names_in(state_dict: Mapping[str, Any]) -> list[str] | None:
    """Return the names of a state dict's parameters in the order of its groups; None when it has none.

    Args:
        state_dict: what an optimizer of torch, or one of ours, returned.

    Raises:
        StateDictError: it is no such thing.
    """
    if not isinstance(state_dict, Mapping) or not {"state", "param_groups"} <= set(state_dict):
        raise StateDictError("an optimizer state dict has the keys 'state' and 'param_groups'")
    groups = state_dict["param_groups"]
    _require_groups(groups)
    if not isinstance(state_dict["state"], Mapping):
        raise StateDictError(
            f"'state' of an optimizer state dict maps indices or names to states, got {_kind(state_dict['state'])}"
        )
    indices = [index for group in groups for index in group["params"]]
    if all("param_names" in group for group in groups):
        return [name for group in groups for name in group["param_names"]]
    return indices if indices and all(isinstance(index, str) for index in indices) else None


def _require_groups(groups: object) -> None:
    """Raise unless groups are what torch's schema has: mappings that list their parameters by number or by name."""
    if not isinstance(groups, (list, tuple)):
        raise StateDictError(
            f"'param_groups' of an optimizer state dict is a list of groups, got {_kind(groups)}"
        )
    for at, group in enumerate(groups):
        if not (isinstance(group, Mapping) and "params" in group):
            raise StateDictError(
                f"param group {at} of the state dict is a mapping with the key 'params', got {_kind(group)}"
            )
        for key, kinds, words in (
            ("params", (int, str), "numbers or names"),
            ("param_names", (str,), "names"),
        ):
            listed = group.get(key, [])
            if not isinstance(listed, (list, tuple)) or not all(isinstance(each, kinds) for each in listed):
                raise StateDictError(
                    f"param group {at} of the state dict: {key!r} is a list of {words}, got {_kind(listed)}"
                )


def _names_of_listed(state_dict: Mapping[str, Any], called: Mapping[str, str]) -> list[str] | None:
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


def _by_position(optimizer: StatefulOptimizer, state_dict: Mapping[str, Any]) -> list[str]:
    """Return names for a state dict without any: of groups like ours, or of one group of the model's parameters."""
    ours = [[optimizer.names[param] for param in group["params"]] for group in optimizer.param_groups]
    sizes, theirs = (
        [len(names) for names in ours],
        [len(group["params"]) for group in state_dict["param_groups"]],
    )
    mine = [name for names in ours for name in names]
    if theirs == sizes:
        return mine
    known = set(mine)
    in_order = (
        [] if optimizer.routing is None else [name for name in optimizer.routing.params if name in known]
    )
    if theirs == [len(known)] == [len(in_order)]:  # of `model.parameters()`, all of which are stepped here
        return in_order
    raise StateDictError(
        f"the state dict has {sum(theirs)} parameters without names, in groups of {', '.join(map(str, theirs))}; this "
        f"optimizer has {len(known)}, in groups of {', '.join(map(str, sizes))}. Without names only the position can "
        "match them. Build both with the same groups, or give all trainable parameters of the model as one group. Or "
        "save names: a torch.optim class that gets model.named_parameters() has param_names"
    )


def origin_in(group: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return what a group says of who stepped it; that of torch's own optimizers says nothing.

    Args:
        group: of a state dict.

    Raises:
        StateDictError: it says it in another way.
    """
    told = group.get(ROUTED, {})
    if isinstance(told, Mapping) and (
        not told
        or (
            told.keys() | {"views", STEPPED} == {"optimizer", "distribution", "roles", "views", STEPPED}
            and all(isinstance(value, str) for key, value in told.items() if key != "views")
            and isinstance(told.get("views", {}), Mapping)
        )
    ):
        return told
    raise StateDictError(
        f"{ROUTED!r} of a param group of the state dict tells optimizer, distribution and what it rests on, got "
        f"{_kind(told)}"
    )


def origin_of(told: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return who stepped a parameter, and how it was seen as matrices if that is told, as a checkpoint describes it.

    Args:
        told: what :func:`origin_in` returned of its group.
        name: of the parameter.

    Raises:
        CheckpointMismatchError: what it was seen as is no view.
    """
    origin: dict[str, Any] = {"optimizer": told.get("optimizer") or None}
    if "views" in told:
        origin |= {"role": "", "view": told["views"].get(name, {})}
        stored_view({**origin, "shape": ()})
    return origin


def fresh_in(state_dict: Mapping[str, Any]) -> set[str]:
    """Return the parameters that a state dict lists as saved before their first step; torch's own lists none.

    Args:
        state_dict: a state dict of torch's schema.

    Raises:
        StateDictError: it lists something else.
    """
    listed = state_dict.get("fresh", [])
    if not isinstance(listed, (list, tuple)) or not all(isinstance(name, str) for name in listed):
        raise StateDictError(
            f"'fresh' of an optimizer state dict is a list of parameter names, got {_kind(listed)}"
        )
    return set(listed)


def is_left_out(value: Any) -> bool:
    """Return whether a state is not in a state dict: torch puts an empty mapping where flat keys lack it.

    Args:
        value: what stands in its place.
    """
    return value is None or (isinstance(value, Mapping) and not value)


def is_written(key: str, value: Any) -> bool:
    """Return whether somebody wrote into a place that was exported before the first step.

    Args:
        key: the state's key.
        value: what is there now.
    """
    return isinstance(value, torch.Tensor) and key != MAIN_PARAM and bool(value.any())


def _kind(value: object) -> str:
    shown = repr(value)
    return f"{type(value).__name__} {shown if len(shown) <= 60 else shown[:60] + '...'}"
