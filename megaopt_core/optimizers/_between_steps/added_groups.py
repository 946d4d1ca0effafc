"""Groups that users add or assign after the build, as trainers do that unfreeze parts of a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from megaopt_core.config._group_values import group_checks
from megaopt_core.errors import ConfigurationError, OwnershipError, UnsupportedOperationError

if TYPE_CHECKING:
    from megaopt_core.optimizers._base import MegatronOptimizer

__all__ = ["add_group", "assign_groups", "follow_last"]

_TOGETHER = "added_together"
_FOLLOWED = "followed_lr"


def add_group(optimizer: MegatronOptimizer, group: Any) -> None:
    """Step more parameters of the model, in groups of their own.

    Args:
        optimizer: a built optimizer.
        group: `params`, and settings.

    Raises:
        MegaoptError: it cannot be added; nothing has changed.
    """
    if optimizer.late is None:
        raise UnsupportedOperationError(
            "add_param_group needs the model, and an optimizer that was wrapped or chained by hand does not "
            "know it: build it with build_optimizer, or build it again with the added parameters"
        )
    listed: Any = group.get("params") if isinstance(group, Mapping) else None
    params: list[torch.nn.Parameter] = [*([listed] if isinstance(listed, torch.Tensor) else listed or ())]
    if not params:
        raise ConfigurationError.got(
            "add_param_group", group, "give a mapping that has parameters of the model under 'params'"
        )
    settings = _settings_of(group)
    _require_settings(settings)
    here = {id(param) for chunk in optimizer.watched_model.alive() for param in chunk.parameters()}
    given = set(params)
    kept = [
        each
        for each in optimizer.param_groups
        if optimizer.late.keeps(each) and given.issuperset(each["params"])
    ]
    free = given.difference(*(each["params"] for each in kept))
    stepped = [optimizer.names[param] for param in free if param in optimizer.names]
    if stepped or len(given) < len(params):
        words = f"{stepped or 'a parameter'} would be in two groups"
        raise OwnershipError(f"add_param_group: {words}", names=stepped)
    if not here.issuperset(map(id, params)):
        words = "a parameter is not in the model that the optimizer was built for"
        raise OwnershipError(f"add_param_group: {words}")
    before = len(optimizer.param_groups)
    optimizer.late.add([param for param in params if param in free])
    added = [*kept, *optimizer.param_groups[before:]]
    own = {"max_lr": settings["lr"]} if "lr" in settings else {}
    for new in added:
        new.update({**(own if new.get("max_lr") else {}), **settings})
    if len(added) > 1:  # what is written into the last of them means all, as where there is one
        for new in added:
            new.update({_TOGETHER: optimizer.names[added[0]["params"][0]], _FOLLOWED: new["lr"]})


def _settings_of(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def _require_settings(settings: Mapping[str, Any]) -> None:
    checks = group_checks(None, settings)
    for key, value in settings.items():
        wrong = checks[key](value) if key in checks else None
        if wrong is not None or (key == "lr" and value is None):
            raise ConfigurationError.of(key, value, wrong or "must be a number", where="add_param_group: ")


def follow_last(groups: Sequence[dict[str, Any]]) -> None:
    """Give groups that were added in one call the learning rate that somebody wrote into the last of them.

    Args:
        groups: of an optimizer.
    """
    together: dict[str, list[dict[str, Any]]] = {}
    for group in groups:
        if _TOGETHER in group:
            together.setdefault(group[_TOGETHER], []).append(group)
    for members in together.values():
        lr, before = members[-1]["lr"], members[-1][_FOLLOWED]
        if lr != before:
            for group in members:
                group.update({"lr": lr if group["lr"] == before else group["lr"], _FOLLOWED: lr})


def assign_groups(optimizer: MegatronOptimizer, groups: Sequence[Mapping[str, Any]]) -> None:
    """Give groups the settings of others that have the same parameters, and add those whose parameters are new.

    Args:
        optimizer: a built optimizer.
        groups: in place of its own, in any order.

    Raises:
        UnsupportedOperationError: they leave out parameters, or divide them otherwise; nothing has changed.
    """
    present = {frozenset(map(id, each["params"])): each for each in optimizer.param_groups if each["params"]}
    given = {frozenset(map(id, each["params"])): each for each in groups if each["params"]}
    known = {id(param) for param in optimizer.names}
    divided = any(members & known for members in given.keys() - present.keys())
    if divided or not present.keys() <= given.keys():
        raise UnsupportedOperationError(
            "param_groups was assigned other groups. Write into the groups that are there, add groups with "
            "add_param_group, and freeze parameters that must not be stepped"
        )
    for members, group in given.items():
        if members not in present:
            add_group(optimizer, group)
            continue
        present[members].update(_settings_of(group))
