"""What may be asked for: arguments of the right kinds, settings that something acts on, every parameter taken once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from megaopt_core.config._optimizer_config import OptimizerConfig
from megaopt_core.errors import (
    ConfigurationError,
    DoubtfulRolesWarning,
    OwnershipError,
    RoutingError,
    ShardingError,
    UnsupportedSettingError,
    warn_user,
)
from megaopt_core.optimizers._gradients.grad_scaler import DynamicGradScaler, MegatronGradScaler
from megaopt_core.params._names import shown
from megaopt_core.params._roles import Doubt
from megaopt_core.precision._choice import require_possible
from megaopt_core.registry._catalogue import RESOLVER
from megaopt_core.registry._registry import PluginRegistry
from megaopt_core.reporting._unused_settings import unused_settings, warn_of_unused
from megaopt_core.reporting._use import Use
from megaopt_core.routing._routing import ParamRoute, Routing

if TYPE_CHECKING:
    from megaopt_core.optimizers._base import MegatronOptimizer
    from megaopt_core.parallel._groups import ProcessGroupCollection
    from megaopt_core.sharding._live_model import LiveModel

__all__ = [
    "dtypes_refused",
    "refusal",
    "require_known_roles",
    "require_name",
    "require_ownership",
    "require_supported",
    "require_trainable",
    "unused",
]

_STRATEGY_SETTINGS = ("overlap_param_gather", "overlap_param_gather_with_optimizer_step")


def require_name(optimizer: object) -> None:
    """Raise unless an optimizer is asked for by a name.

    Args:
        optimizer: what a user gave.
    """
    if isinstance(optimizer, str):
        return
    if isinstance(optimizer, (OptimizerConfig, Mapping)):
        advice = "pass a configuration to get_megatron_optimizer(config, model), or its settings as keywords: lr=..."
    elif isinstance(optimizer, torch.optim.Optimizer):
        advice = "wrap an optimizer that exists already: FP32Optimizer(optimizer, config)"
    elif isinstance(optimizer, type) and optimizer.__module__.startswith("torch.optim."):
        advice = (
            f"the name of torch's class is 'torch:{optimizer.__name__}' ({RESOLVER}); `megaopt optimizers` "
            "lists others"
        )
    else:
        advice = "`megaopt optimizers` lists the names; a plugin gives a name to a class of another package"
    shown = optimizer.__name__ if isinstance(optimizer, type) else type(optimizer).__name__
    raise ConfigurationError.got("optimizer", optimizer, f"give a registered name: {advice}", shown=shown)


def require_trainable(routing: Routing) -> None:
    """Raise if no rank has a parameter to step.

    Args:
        routing: what was routed.
        registry: the plugins.
    """
    if routing.groups:
        return
    if routing.frozen or routing.excluded:
        left = f"{len(routing.frozen)} are frozen (requires_grad=False)"
        left += (
            f', {len(routing.excluded)} have the override {{"optimizer": "none"}}' if routing.excluded else ""
        )
        raise ConfigurationError(
            f"there is nothing to train: of the model's {len(routing.frozen) + len(routing.excluded)} "
            f"parameters {left}; unfreeze the parameters that must train, then build",
            setting="model",
        )
    raise ConfigurationError("there is nothing to train: the model has no parameters", setting="model")


def require_known_roles(config: OptimizerConfig, routing: Routing, registry: PluginRegistry) -> None:
    """Warn where it is in doubt which parameters are matrices, if that matters to the optimizer that was asked for.

    Args:
        config: the run's configuration.
        routing: what was routed.
        registry: the plugins.

    Raises:
        RoutingError: the optimizer is for matrices, and steps nothing on any rank, though no override wants it so here.
    """
    name = config.optimizer
    if registry.optimizer(name).accepts is None:
        return
    weights = {
        param: entry
        for param, entry in routing.params.items()
        if len(entry.spec.shape) > 1 and "optimizer" not in entry.override
    }
    kept = {p: e for p, e in weights.items() if e.decision.doubt is Doubt.ROLE and e.spec.optimizer != name}
    whole = {
        p: e for p, e in weights.items() if e.decision.doubt is Doubt.LAYOUT and e.spec.optimizer == name
    }
    lines = []
    if kept:
        lines.append(
            f"{len(kept)} of {len(weights)} weights go to {_optimizers(kept)}, because they may or may not "
            f"be hidden matrices: {_first_reasons(kept)}"
        )
    if whole:
        lines.append(
            f"{len(whole)} of {len(weights)} are stepped as one matrix each, though they may hold several: "
            f"{_first_reasons(whole)}"
        )
    failed = next((e.decision.no_forward for e in weights.values() if e.decision.no_forward), "")
    lines += [failed] if failed and lines else []
    remedy = (
        "Pass example=batch: one forward on the meta device then shows how the "
        "weights are used. Or set an attribute of the parameter: use_muon (True for a matrix, else False) "
        "or matrix_view (the matrices inside it). Or give an override"
    )
    idle = all(child.optimizer != name for child in routing.children)
    if idle and (weights or not any("optimizer" in entry.override for entry in routing.params.values())):
        why = lines or [
            f"no trainable parameter is a hidden matrix; {_optimizers(routing.params)} would step them all"
        ]
        raise RoutingError(
            ". ".join((f"{name!r} would step nothing on any rank: {why[0]}", *why[1:], remedy))
        )
    if lines:
        warn_user(". ".join((f"{name!r}: {lines[0]}", *lines[1:], remedy)), DoubtfulRolesWarning)


def _optimizers(entries: Mapping[str, ParamRoute]) -> str:
    return ", ".join(sorted({entry.spec.optimizer for entry in entries.values()}))


def _first_reasons(entries: Mapping[str, ParamRoute]) -> str:
    """Return the first names, and why the first of them is in doubt."""
    first = next(iter(entries.values()))
    return f"{shown(list(entries), 3)} ({first.decision.reason})"


def require_supported(config: OptimizerConfig, routing: Routing, registry: PluginRegistry) -> None:
    """Raise if a setting is on that nothing in use acts on.

    Args:
        config: the run's configuration.
        routing: which optimizers and strategies are in use.
        registry: the plugins.
    """
    require_possible(
        config, {child.optimizer: registry.optimizer(child.optimizer) for child in routing.children}
    )
    used = sorted({child.strategy for child in routing.children})
    for setting in _STRATEGY_SETTINGS:
        supported = any(setting in registry.strategy(name).supported_settings for name in used)
        if getattr(config, setting) and not supported:
            raise UnsupportedSettingError.of(
                setting,
                value=True,
                why=f"has no effect with the sharding strategy {', '.join(map(repr, used))}, which gathers "
                "no parameters; leave it out, or choose a strategy that overlaps",
            )
    _require_peers_possible(config, routing, registry)


def _require_peers_possible(config: OptimizerConfig, routing: Routing, registry: PluginRegistry) -> None:
    """Raise if peers are asked for where no strategy gives any, or no optimizer takes any."""
    asked = config.peers_per_matrix
    if asked is None:
        return
    setting = "peers_per_matrix"
    giving = [
        child for child in routing.children if setting in registry.strategy(child.strategy).supported_settings
    ]
    if not giving:
        used = sorted({child.strategy for child in routing.children})
        reason = f"no rank steps a part of a matrix under the sharding strategy {', '.join(map(repr, used))}"
    elif asked > 1 and not any(
        registry.optimizer(child.optimizer).configured(config).supports_peers for child in giving
    ):
        used = sorted({child.optimizer for child in giving})
        reason = f"{', '.join(map(repr, used))} must have whole matrices with these settings"
    else:
        return
    raise UnsupportedSettingError.of(setting, asked, f"has no effect: {reason}; leave it out")


def unused(
    config: OptimizerConfig,
    routing: Routing,
    model: LiveModel,
    pgs: ProcessGroupCollection,
    scaler: MegatronGradScaler | None,
    by_runners: Mapping[str, str],
) -> tuple[str, ...]:
    """Return the settings that nothing in use acts on, and warn of them.

    Args:
        config: the run's configuration.
        routing: which optimizers are in use.
        model: this rank's parameters.
        pgs: the process groups.
        scaler: the loss scaler.
        by_runners: setting to why what runs the inner steps does not act on it.
    """
    unused = unused_settings(
        Use(
            config,
            model.params.values(),
            routing,
            model.chunks,
            pgs,
            scales_dynamically=isinstance(scaler, DynamicGradScaler),
            by_runners=by_runners,
        )
    )
    warn_of_unused(unused)
    return unused


def dtypes_refused(
    routing: Routing, children: Sequence[MegatronOptimizer], registry: PluginRegistry
) -> dict[str, str]:
    """Return the settings of state dtypes that single states do not take, with the names of these.

    Args:
        routing: which optimizers are in use.
        children: what was built, in its order.
        registry: the plugins.
    """
    found: dict[str, list[str]] = {}
    for asked, child in zip(routing.children, children, strict=True):
        settings = registry.optimizer(asked.optimizer).state_dtype_settings
        for part in child.parts:
            for index, key in part.precision.kept_as_they_are():
                name = part.pieces[index].spec.members[0][1].name
                found.setdefault(settings[key], []).append(f"{key} of {name}")
    return {
        setting: f"does not reach {shown(names, 4)}: a state of several matrices in one parameter stays in float32"
        for setting, names in found.items()
    }


def refusal(
    routing: Routing, params: Mapping[str, torch.nn.Parameter], registry: PluginRegistry
) -> ShardingError | None:
    """Return why a strategy cannot take one of this rank's parameters; other ranks may hold none like it.

    Args:
        routing: which strategy each is given to.
        params: this rank's parameters by name.
        registry: the plugins.
    """
    for name, param in params.items():
        entry = routing.params[name]
        with registry.blaming("strategy", entry.strategy):
            reason = registry.strategy(entry.strategy).refuse(param, entry.spec)
        if reason is not None:
            return ShardingError(f"sharding={entry.strategy!r} cannot take {name!r}: {reason}")
    return None


def require_ownership(
    children: Sequence[MegatronOptimizer], params: Mapping[str, torch.nn.Parameter]
) -> None:
    """Raise unless every parameter is stepped by one optimizer.

    Args:
        children: the optimizers.
        params: this rank's parameters by name.
    """
    owned = Counter(param for child in children for param in child.get_parameters())
    wrong = [name for name, param in params.items() if owned[param] != 1]
    if wrong:
        raise OwnershipError(
            f"{len(wrong)} trainable parameters are not owned exactly once: {', '.join(wrong[:5])}",
            names=wrong,
        )
