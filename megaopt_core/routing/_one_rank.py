"""What one rank decides of its own parameters, before the ranks agree."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from attrs import Factory, frozen

from megaopt_core.config._optimizer_config import OptimizerConfig
from megaopt_core.errors import OverrideError, PluginError, PluginNotInstalledError, RoutingError
from megaopt_core.parallel._groups import ProcessGroupCollection
from megaopt_core.params._keys import ParamKey
from megaopt_core.params._overrides import NO_OPTIMIZER, ParamGroupOverride
from megaopt_core.params._specs import ParamSpec
from megaopt_core.plugin_api._entries import OptimizerEntry
from megaopt_core.registry._registry import PluginRegistry, get_registry
from megaopt_core.routing._agreement import Holding, stages_of_names
from megaopt_core.routing._assign import Assigner, Assignment
from megaopt_core.routing._groups import GroupKey
from megaopt_core.routing._inventory import Inventory, InventoryItem, take_inventory
from megaopt_core.routing._overrides.from_config import get_standard_config_overrides
from megaopt_core.routing._overrides.matching import STANDARD, OverrideSet
from megaopt_core.routing._overrides.settings import OverrideSettings
from megaopt_core.routing._plugin_faults import add_plugin_overrides, raise_or_warn
from megaopt_core.routing._routing import NameMap
from megaopt_core.routing._sharding import strategies_that_claim
from megaopt_core.routing._stored import GivenRouting, as_stored, read_stored_routing

__all__ = ["RankRouting", "Told", "route_this_rank"]


@frozen
class Told:
    """What ranks tell each other."""

    keys: frozenset[GroupKey] = frozenset()
    matched: frozenset[str] = frozenset()
    norm_groups: frozenset[str] = frozenset()
    followed: str = ""
    claims: frozenset[str] = frozenset()
    stages: Mapping[str, list[int]] = Factory(dict)
    no_forward: str = ""


@frozen
class RankRouting:
    """What this rank found, before the ranks agree."""

    inventory: Inventory
    assignments: dict[str, Assignment]
    specs: dict[str, ParamSpec]
    held: Holding
    overrides: OverrideSet
    told: Told
    registry: PluginRegistry


def route_this_rank(
    config: OptimizerConfig,
    chunks: Sequence[torch.nn.Module],
    config_overrides: Mapping[ParamKey, ParamGroupOverride] | None,
    pgs: ProcessGroupCollection,
    fqn: NameMap | None = None,
    example: Any = None,
    routing: GivenRouting | None = None,
    trusted_names: Collection[str] = (),
    no_forward: str = "",
) -> RankRouting:
    """Return what this rank decides of its parameters, by itself.

    Args:
        config: the run's configuration.
        chunks: the model chunks.
        config_overrides: as for `route`.
        pgs: the process groups.
        fqn: as for `route`.
        example: as for `route`.
        routing: as for `route`.
        trusted_names: as for `route`.
        no_forward: why no forward may be run; empty: one may.

    Raises:
        MegaoptError: as for `route`.
    """
    registry = get_registry()
    primary = registry.optimizer(config.optimizer)
    stored = read_stored_routing(routing, registry)
    inventory = take_inventory(chunks, pgs, fqn, example, no_forward)
    overrides = OverrideSet()
    if config_overrides is None or getattr(config_overrides, "with_standard", False):
        standard = get_standard_config_overrides(config)
        given = config_overrides or {}
        overrides.add({key: standard[key] for key in standard if key not in given}, STANDARD)
    if config_overrides is not None:
        overrides.add(config_overrides, "config_overrides", must_match=True)
    with registry.blaming("optimizer", config.optimizer):
        try:
            overrides.add(primary.default_param_overrides, f"default of {config.optimizer}")
        except OverrideError as error:
            raise PluginError(f"its default_param_overrides: {error}") from error
    overriders = add_plugin_overrides(overrides, config, chunks, registry)
    if stored is not None:
        trusted = {*trusted_names, *(value for value in config.to_dict().values() if isinstance(value, str))}
        trusted |= {override.get("optimizer", "") for override in (config_overrides or {}).values()}
        inventory.trainable = as_stored(stored, inventory.trainable, trusted, registry)
    assigner = Assigner(config, OverrideSettings(config, chunks, pgs, registry), registry, stored)
    assignments = {}
    for item in inventory.trainable:
        try:
            overrides.require_read(item.name, item.decision, registry)
        except (PluginNotInstalledError, RoutingError):
            if inventory.failed:  # a reader of models is there, and has failed
                raise inventory.failed[0] from None
            raise
        match = overrides.match(item.named, item.decision.role)
        if match.override.get("optimizer") == NO_OPTIMIZER:
            inventory.excluded.append(item)
        else:
            assignments[item.name] = assigner.assign(item, match)
    inventory.trainable = [item for item in inventory.trainable if item.name in assignments]
    for item in inventory.frozen:
        overrides.match(item.named, item.decision.role)
    used = {assignment.key.optimizer for assignment in assignments.values()}
    raise_or_warn(inventory.failed, overriders, config, used, registry)
    held = Holding.of(inventory.trainable, assignments)
    # Entries are asked here: what fails on one rank has to be told before the ranks agree.
    specs = _specs_of(inventory.trainable, assignments, config, registry)
    told = Told(
        keys=frozenset(assignment.key for assignment in assignments.values()),
        matched=frozenset(overrides.matched),
        norm_groups=frozenset(item.grad_norm_group for item in inventory.trainable if item.grad_norm_group),
        followed="" if stored is None else hashlib.sha256(repr(stored).encode()).hexdigest(),
        claims=strategies_that_claim(inventory.trainable, registry),
        stages={}
        if stored is None
        else stages_of_names(
            [item.name for item in inventory.trainable if not item.shared],
            [item.name for item in inventory.trainable if item.is_expert],
            pgs.axes,
            pgs.coordinates,
        ),
        no_forward=inventory.no_forward,
    )
    return RankRouting(inventory, assignments, specs, held, overrides, told, registry)


def _specs_of(
    items: Sequence[InventoryItem],
    assignments: Mapping[str, Assignment],
    config: OptimizerConfig,
    registry: PluginRegistry,
) -> dict[str, ParamSpec]:
    """Return parameters as pure data."""
    specs: dict[str, ParamSpec] = {}
    configured: dict[str, OptimizerEntry] = {}
    for item in items:
        optimizer = assignments[item.name].key.optimizer
        with registry.blaming("optimizer", optimizer):
            if optimizer not in configured:
                configured[optimizer] = registry.optimizer(optimizer).configured(config)
            specs[item.name] = item.spec(optimizer, configured[optimizer], peers=config.peers_per_matrix)
    return specs
