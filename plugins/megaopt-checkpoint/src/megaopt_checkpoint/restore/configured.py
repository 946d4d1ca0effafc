"""Settings of groups that are configured, beside saved ones: the run goes on, but for what a user changed since."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from megaopt_core.state import GroupMerge, equal_settings, merge_groups, settings_of

if TYPE_CHECKING:
    from megaopt_core.optimizers import MegatronOptimizer

__all__ = ["configured", "merge_configured"]


def configured(optimizer: MegatronOptimizer) -> list[dict[str, Any]]:
    """Return what the configuration says about each group's settings, as far as it says something.

    Args:
        optimizer: a built optimizer.
    """
    said: list[dict[str, Any]] = [
        {key: part.inner.defaults[key] for key in settings_of(group) if key in part.inner.defaults}
        for part in optimizer.parts
        for group in part.groups
    ]
    routing = optimizer.routing
    if routing is not None:
        indices = [index for child in routing.children for index in child.groups]
        for position, (values, group) in enumerate(zip(said, optimizer.param_groups, strict=True)):
            if group["params"]:
                entry = routing.params.get(optimizer.names[group["params"][0]])
                if entry is not None:  # else it was wrapped by hand
                    values.update(routing.groups[entry.spec.group].values)
            elif len(indices) == len(said):
                values.update(routing.groups[indices[position]].values)
    return said


def merge_configured(
    optimizer: MegatronOptimizer,
    group_of: Mapping[str, int | None],
    groups: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]],
) -> tuple[GroupMerge, dict[str, tuple[Any, Any]]]:
    """Decide about every setting of every group, and return what is kept: `"group 0: lr"` to the value here and there.

    A setting has three values: what was configured when it was saved, what it was by then (a schedule, the optimizer or
    the user may have changed it), and what is configured now. Where the configuration is what it was, the run goes on
    with the saved value; where it differs, somebody has changed it, and it wins. Where nobody knows what was
    configured, as in a state dict, the saved value holds.

    Args:
        optimizer: the optimizer that is loaded.
        group_of: parameter here to its group there, of those that the same optimizer steps; None: nobody knows.
        groups: of each group there its settings, and what was configured.
    """
    now, kept = configured(optimizer), dict[tuple[int, str], tuple[Any, Any]]()

    def stays(index: int, position: int, key: str) -> bool:
        (settings, was), here = groups[position], now[index]
        if key not in here or key not in was or equal_settings(here[key], was[key]):
            return False
        if not equal_settings(here[key], settings[key]):
            kept[index, key] = here[key], settings[key]
        return True

    merge = merge_groups(optimizer, group_of, [settings for settings, _ in groups], stays)
    return merge, {
        f"group {index}: {key}": values
        for (index, key), values in kept.items()
        if key not in merge.changes[index]  # a scheduler's rule may say otherwise
    }
