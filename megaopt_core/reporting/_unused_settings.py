"""Settings that differ from their defaults and that nothing in use acts on: each in one sentence that says why."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from attrs import Factory, frozen

from megaopt_core.config._dtypes import dtype_name, parse_dtype, shown
from megaopt_core.config._fields import AWARE_DTYPES, CORE_FIELD_NAMES, core_field_info
from megaopt_core.config._optimizer_config import OptimizerConfig
from megaopt_core.errors import MegaoptError, PluginError, UnusedSettingWarning
from megaopt_core.precision._policy import LOW_PRECISION
from megaopt_core.registry._constructor import constructor_kwargs
from megaopt_core.registry._registry import get_registry

if TYPE_CHECKING:
    from megaopt_core.parallel._groups import ProcessGroupCollection
    from megaopt_core.params._specs import ParamSpec
    from megaopt_core.plugin_api._entries import OptimizerEntry
    from megaopt_core.routing._routing import Routing

__all__ = ["Use", "unused_settings", "warn_of_unused"]

_SCALING = ("initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis")
_OF_OVERRIDES = ("decoupled_lr", "decoupled_min_lr", "apply_wd_to_qk_layernorm")
_DECAY = ("decoupled_weight_decay", "cautious_weight_decay")
_OF_OFFLOAD = (
    "optimizer_offload_fraction",
    "use_torch_optimizer_for_cpu_offload",
    "overlap_cpu_optimizer_d2h_h2d",
    "pin_cpu_grads",
    "pin_cpu_params",
)
_DEFAULTS = {info.name: info.default for info in core_field_info()}


@frozen
class Use:
    """What a configuration is used for.

    Args:
        config: the configuration.
        dtypes: of the trainable floating-point parameters of this rank; empty: nobody can say.
        entries: registered name to entry, of every optimizer in use; empty: one that was built by hand is wrapped.
        routing: where every parameter goes; None for an optimizer that was wrapped.
        chunks: the model chunks, which some entries look at.
        pgs: the process groups, which some entries look at.
        scales_dynamically: the loss scale follows the configuration.
        by_runners: setting to why what runs the inner steps does not act on it.
    """

    config: OptimizerConfig
    dtypes: frozenset[torch.dtype]
    entries: Mapping[str, OptimizerEntry] = Factory(dict)
    routing: Routing | None = None
    chunks: Sequence[torch.nn.Module] = ()
    pgs: ProcessGroupCollection | None = None
    scales_dynamically: bool = False
    by_runners: Mapping[str, str] = Factory(dict)

    def is_set(self, name: str) -> bool:
        """Return whether a core field differs from its default.

        Args:
            name: the field.
        """
        return bool(getattr(self.config, name) != _DEFAULTS[name])

    def says(self, name: str, why: str) -> str:
        """Return the sentence about one setting.

        Args:
            name: the setting.
            why: why nothing acts on it.
        """
        return f"{name}={shown(getattr(self.config, name))}: {why}"


def unused_settings(use: Use) -> tuple[str, ...]:
    """Return one sentence for every setting that was given and changes nothing, sorted.

    Args:
        use: the configuration, and what it is used for.
    """
    found = [*_dtypes(use), *_scaling(use), *_overrides(use), *_decay(use), *_of_other_optimizers(use)]
    found += [use.says(name, why) for name, why in use.by_runners.items()]
    found += [use.says(name, why) for name, why in _told_by_entries(use).items()]
    if use.config.stochastic_state_rounding and not _keeps_bytes(use):
        found.append(use.says("stochastic_state_rounding", "no state is kept in 8 bits (uint8)"))
    if not (use.config.skip_nonfinite_steps or use.config.bf16):
        found.append(use.says("skip_nonfinite_steps", "only mixed precision skips such steps"))
    if not use.config.optimizer_cpu_offload:
        found += [
            use.says(name, "optimizer_cpu_offload is False") for name in _OF_OFFLOAD if use.is_set(name)
        ]
    if use.config.barrier_with_L1_time and use.config.timers is None:
        found.append(use.says("barrier_with_L1_time", "there are no timers"))
    return tuple(sorted(found))


def warn_of_unused(sentences: Collection[str], *, stacklevel: int) -> None:
    """Warn once of all settings that change nothing.

    Args:
        sentences: what :func:`unused_settings` returned.
        stacklevel: how many calls up the user's line is.
    """
    if sentences:
        warnings.warn(
            f"settings that change nothing here: {'; '.join(sentences)}",
            UnusedSettingWarning,
            stacklevel=stacklevel + 1,
        )


def _dtypes(use: Use) -> Iterator[str]:
    config, dtypes = use.config, use.dtypes
    names = ", ".join(sorted(map(dtype_name, dtypes)))
    if dtypes:
        if use.is_set("params_dtype") and config.params_dtype not in dtypes:
            yield use.says("params_dtype", f"the model's parameters are {names}; nothing casts them")
        for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
            if getattr(config, name) and dtype not in dtypes:
                yield use.says(name, f"the model's parameters are {names}; cast the model before the build")
    remainders = torch.bfloat16 in dtypes or not dtypes
    if not config.store_param_remainders:
        if not config.use_precision_aware_optimizer:
            yield use.says("store_param_remainders", "use_precision_aware_optimizer is False")
        elif not (remainders and config.main_params_dtype == torch.float32):
            yield use.says(
                "store_param_remainders", "only bf16 parameters with fp32 main values have remainders"
            )
    mixed = config.bf16 or config.fp16 or dtypes & set(LOW_PRECISION)
    if config.use_precision_aware_optimizer and not mixed and not any(map(use.is_set, AWARE_DTYPES)):
        governed = {key for entry in use.entries.values() for key in entry.state_dtype_settings.values()}
        if not governed & set(config.plugin_settings):
            yield use.says("use_precision_aware_optimizer", "every dtype is float32 and so is the step")


def _keeps_bytes(use: Use) -> bool:
    governed = {key for entry in use.entries.values() for key in entry.state_dtype_settings.values()}
    return use.config.use_precision_aware_optimizer and any(
        parse_dtype(getattr(use.config, key)) == torch.uint8 for key in governed
    )


def _scaling(use: Use) -> Iterator[str]:
    why = "only a dynamic loss scale reads it, which fp16=True without loss_scale has"
    if not use.scales_dynamically:
        yield from (use.says(name, why) for name in _SCALING if use.is_set(name))


def _overrides(use: Use) -> Iterator[str]:
    """Yield what overrides say that nothing reads, and what only the standard ones read where they match nothing."""
    config, routing = use.config, use.routing
    if config.decoupled_min_lr is not None and config.decoupled_lr is None:
        yield use.says("decoupled_min_lr", "decoupled_lr is not set")
    if routing is None:
        why = "overrides choose groups, and the wrapped optimizer has its own"
        yield from (use.says(name, why) for name in _OF_OVERRIDES if use.is_set(name))
        return
    for factor in sorted({group.values["lr_mult"] for group in routing.groups} - {1.0}):
        yield f"lr_mult={factor!r} in an override: it only keeps groups apart; max_lr is the learning rate of a group"
    why = "no parameter is an embedding or output head that the standard overrides reach"
    if config.decoupled_lr is not None:
        keys = ("max_lr", "min_lr")
        for name, key in zip(("decoupled_lr", "decoupled_min_lr"), keys, strict=True):
            value = getattr(config, name)
            if value is not None and all(group.values[key] != value for group in routing.groups):
                yield use.says(name, why)
    if config.apply_wd_to_qk_layernorm and not any(
        ("q_layernorm." in name or "k_layernorm." in name) and entry.override.get("wd_mult") != 0.0
        for name, entry in routing.params.items()
    ):
        yield use.says("apply_wd_to_qk_layernorm", "no parameter of a q_layernorm or k_layernorm decays")


def _decay(use: Use) -> Iterator[str]:
    """Yield kinds of weight decay that an optimizer in use does not read: its constructor gets the same without."""
    for name in _DECAY:
        if not use.is_set(name):
            continue
        if use.routing is None:
            yield use.says(name, "the wrapped optimizer was built with its own")
            continue
        plain = use.config.replace(**{name: _DEFAULTS[name]})
        deaf = [each for each, entry in use.entries.items() if not _differs(use, entry, plain)]
        others = "".join(f", {each} does" for each in sorted(use.entries.keys() - set(deaf)))
        if deaf:
            yield use.says(name, f"{', '.join(sorted(deaf))} does not read it{others}")


def _of_other_optimizers(use: Use) -> Iterator[str]:
    if use.routing is None:
        return
    owners = get_registry().setting_owners()
    prefixes = {prefix for entry in use.entries.values() for prefix in entry.setting_prefixes}
    used = ", ".join(sorted(use.entries))
    given = use.config.plugin_settings
    for name, value in given.items():
        if name in owners and owners[name].prefix in prefixes:
            continue
        if name in owners and _is_read(use, owners[name].prefix):
            continue
        yield f"{name}={value!r}: no optimizer in use reads it ({used})"


def _told_by_entries(use: Use) -> dict[str, str]:
    """Return what optimizers say of their own settings: what all of those say that read a setting."""
    if use.routing is None:
        return {}
    specs: dict[str, list[ParamSpec]] = {name: [] for name in use.entries}
    for route in use.routing.params.values():
        specs.get(route.spec.optimizer, []).append(route.spec)
    told = {name: _told_by(use, name, entry, specs[name]) for name, entry in use.entries.items()}
    owners = get_registry().setting_owners()
    return {
        setting: why
        for said in told.values()
        for setting, why in said.items()
        if all(
            setting in told[name]
            for name, entry in use.entries.items()
            if owners[setting].prefix in entry.setting_prefixes
        )
    }


def _told_by(use: Use, name: str, entry: OptimizerEntry, specs: Sequence[ParamSpec]) -> Mapping[str, str]:
    if entry.unused_settings is None:
        return {}
    owners = get_registry().setting_owners()
    with get_registry().blaming("optimizer", name):
        told = entry.unused_settings(use.config, specs)
        if not isinstance(told, Mapping) or any(setting not in owners for setting in told):
            raise PluginError(
                f"unused_settings returned {told!r}; it must map settings of plugins to reasons"
            )
    return told


def _is_read(use: Use, prefix: str) -> bool:
    """Whether an optimizer in use is built with settings of another's prefix, as SOAP is with Adam's."""
    owners = get_registry().setting_owners()
    core = {name: getattr(use.config, name) for name in CORE_FIELD_NAMES}
    rest = {
        name: value
        for name, value in use.config.plugin_settings.items()
        if name not in owners or owners[name].prefix != prefix
    }
    without = OptimizerConfig(**core, **rest)
    return any(_differs(use, entry, without) for entry in use.entries.values())


def _differs(use: Use, entry: OptimizerEntry, other: OptimizerConfig) -> bool:
    """Whether an optimizer is built otherwise with another configuration."""
    try:
        mine, theirs = (
            constructor_kwargs(entry, config, use.chunks, use.pgs) for config in (use.config, other)
        )
    except (MegaoptError, ValueError):
        return True
    return not _equal(mine, theirs)


def _equal(left: Any, right: Any) -> bool:
    try:
        return left is right or bool(left == right)
    except (RuntimeError, ValueError):
        return False
