"""Following the routing that a checkpoint holds, whatever would be found in the model here and now."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence

from attrs import evolve

from megaopt_core.errors import (
    CheckpointError,
    ConfigurationError,
    DuplicateNameError,
    MegaoptError,
    PluginHookError,
    RoutingError,
)
from megaopt_core.params._names import shown
from megaopt_core.params._roles import Role, RoleDecision
from megaopt_core.params._views import MatrixView
from megaopt_core.plugin_api._stored_routing import StoredParam, StoredRouting
from megaopt_core.registry._catalogue import CHECKPOINT_READER
from megaopt_core.registry._registry import PluginRegistry
from megaopt_core.routing._inventory import InventoryItem

__all__ = ["GivenRouting", "as_stored", "read_stored_routing", "stored_param"]

type GivenRouting = str | os.PathLike[str] | StoredRouting
"""A checkpoint, or what was read from one."""


def read_stored_routing(given: GivenRouting | None, registry: PluginRegistry) -> StoredRouting | None:
    """Return the routing that a checkpoint holds: a plugin reads it.

    Args:
        given: the checkpoint; a routing stays as it is, and None None.
        registry: the plugins.

    Raises:
        PluginNotInstalledError: no plugin reads checkpoints.
        CheckpointError: there is no checkpoint, it cannot be read, or it holds no routing.
        DuplicateNameError: two plugins read it.
        RoutingError: what a plugin read is no routing.
    """
    if given is None or isinstance(given, StoredRouting):
        return given
    if not isinstance(given, (str, os.PathLike)):
        raise ConfigurationError.got("routing", given, "give the folder of a checkpoint")
    path = os.fspath(given)
    # A reader that does not know what lies there may say so with an error: it is no obstacle to one that does.
    failed: list[PluginHookError] = []
    answers = registry.call_each("megaopt_stored_routing", failed=failed, path=path)
    if len(answers) > 1:
        first, second = answers[0][0], answers[1][0]
        raise DuplicateNameError(
            f"both {first} and {second} read routing={path!r}; uninstall one of them, or block it: "
            f"MEGAOPT_DISABLE_PLUGINS={second.distribution or second.name}",
            name=path,
            owners=(first.source, second.source),
        )
    if answers:
        return _checked(*answers[0])
    for error in failed:
        raise error.__cause__ if isinstance(error.__cause__, MegaoptError) else error from None
    absent = registry.absent_plugin(f"the reader of routing={path!r}", CHECKPOINT_READER, CHECKPOINT_READER)
    raise absent or CheckpointError(
        f"routing={path!r}: must be a checkpoint that an installed plugin reads; none reads this", path=path
    )


def _checked(plugin: object, answer: object) -> StoredRouting:
    if not isinstance(answer, StoredRouting):
        raise RoutingError(
            f"{plugin}: megaopt_stored_routing returned {type(answer).__name__}; it must return a StoredRouting"
        )
    for what, value, is_one in (
        ("name", answer.name, isinstance(answer.name, str)),
        ("readers", answer.readers, isinstance(answer.readers, str)),
        ("params", answer.params, _maps(answer.params, _is_stored_param)),
        ("plugins", answer.plugins, _maps(answer.plugins, lambda brings: isinstance(brings, str))),
    ):
        if not is_one:
            raise RoutingError(
                f"{plugin}: megaopt_stored_routing returned a StoredRouting whose {what} cannot be used: {value!r:.200}"
            )
    return answer


def _maps(value: object, is_one: Callable[[object], bool]) -> bool:
    return isinstance(value, Mapping) and all(
        isinstance(key, str) and is_one(each) for key, each in value.items()
    )


def _is_stored_param(value: object) -> bool:
    return (
        isinstance(value, StoredParam)
        and isinstance(value.optimizer, str)
        and isinstance(value.role, Role | None)
        and isinstance(value.view, MatrixView | None)
        and isinstance(value.shape, tuple)
    )


def as_stored(
    stored: StoredRouting,
    items: Sequence[InventoryItem],
    trusted: Collection[str],
    registry: PluginRegistry,
) -> list[InventoryItem]:
    """Return parameters as they were when their routing was stored.

    Args:
        stored: the routing to follow.
        items: the trainable parameters of this rank.
        trusted: names of optimizers that the user has given, and that may be resolved.
        registry: the plugins.

    Raises:
        RoutingError: a parameter is not named in it, was stepped by the optimizer of another distribution or by one
            that no plugin lists and the user has not named, or is a part of another size here and is not seen as the
            same matrices.
        PluginNotInstalledError: an optimizer that it names is not installed.
    """
    absent = [item.name for item in items if not any(name in stored.params for name in _names(item))]
    if absent:
        raise RoutingError(
            f"{stored.name} holds no routing of {len(absent)} trainable parameters: {shown(absent)}. It belongs to "
            "another model, or these parameters were frozen then; build the optimizer without routing=",
            names=absent,
        )
    for item in items:
        _require_installed(stored, stored_param(stored, item).optimizer, item.name, trusted, registry)
    return [evolve(item, decision=_decision(stored, item)) for item in items]


def stored_param(stored: StoredRouting, item: InventoryItem) -> StoredParam:
    """Return where a parameter went; a tied one is found under each of its names.

    Args:
        stored: the routing to follow; it names the parameter.
        item: the parameter.
    """
    return next(stored.params[name] for name in _names(item) if name in stored.params)


def _names(item: InventoryItem) -> tuple[str, ...]:
    return item.name, *item.aliases


def _require_installed(
    stored: StoredRouting, optimizer: str, name: str, trusted: Collection[str], registry: PluginRegistry
) -> None:
    distribution = stored.plugins.get(optimizer)
    if not registry.has_optimizer(optimizer, listed=True):
        what = f"optimizer {optimizer!r}, which steps {name!r} in {stored.name},"
        absent = registry.absent_plugin(what, optimizer, distribution) if distribution else None
        if absent is not None:
            raise absent
        if ":" in optimizer and optimizer not in trusted:
            raise RoutingError(
                f"{what} is listed by no plugin here, and a name in a file is not imported by itself. If you "
                f"trust the name, allow it: trusted_names=[{optimizer!r}]",
                names=[name],
            )
    registry.optimizer(optimizer)
    ours = registry.owner("optimizer", optimizer).distribution
    if distribution and ours and distribution != ours:
        raise RoutingError(
            f"{stored.name}: the optimizer {optimizer!r} of {name!r} came from {distribution}, but here it comes from "
            f"{ours}; install {distribution} in its place, or build the optimizer without routing=",
            names=[name],
        )


def _decision(stored: StoredRouting, item: InventoryItem) -> RoleDecision:
    there, shape = stored_param(stored, item), item.part.shape
    if there.role is None:
        return item.decision
    # A view of a part has sizes of that part: at another tensor-parallel size what is found here fits.
    if there.view is not None and there.view.split_sizes and there.shape != shape:
        here = item.decision.view
        if here is None or not here.is_like(there.view, shape, there.shape):
            raise RoutingError(
                f"{stored.name}: {item.name!r} had the view {there.view} and the shape {there.shape}; here "
                f"it has the view {here or 'no matrix'} and the shape {shape}. Set its attribute "
                f"matrix_view, or install the reader of the roles: {stored.readers or 'it is not known'}",
                names=[item.name],
            )
        return item.decision
    return RoleDecision(there.role, f"as in {stored.name}", there.view, reader=stored.readers)
