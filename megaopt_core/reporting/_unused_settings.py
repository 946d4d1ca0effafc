"""Settings that differ from their defaults and that nothing in use acts on: each in one sentence that says why."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from megaopt_core.config._dtypes import dtype_name, parse_dtype
from megaopt_core.config._fields import AWARE_DTYPES
from megaopt_core.errors import UnusedSettingWarning, warn_user
from megaopt_core.parallel._groups import ProcessGroupCollection
from megaopt_core.precision._storage import LOW_PRECISION
from megaopt_core.reporting._use import Use, unread_by_optimizers

if TYPE_CHECKING:
    from megaopt_core.config._optimizer_config import OptimizerConfig
    from megaopt_core.routing._routing import Routing

__all__ = ["settings_without_effect", "unused_settings", "warn_of_unused"]

_SCALING = ("initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis")
_OF_OVERRIDES = ("decoupled_lr", "decoupled_min_lr", "apply_wd_to_qk_layernorm")
_OF_OFFLOAD = (
    "optimizer_offload_fraction",
    "use_torch_optimizer_for_cpu_offload",
    "overlap_cpu_optimizer_d2h_h2d",
    "pin_cpu_grads",
    "pin_cpu_params",
)


def settings_without_effect(
    config: OptimizerConfig, routing: Routing, chunks: Sequence[torch.nn.Module]
) -> tuple[str, ...]:
    """Return one sentence for every setting that would change nothing, as a build in one process warns of them.

    Args:
        config: the configuration.
        routing: what `route` returned for it.
        chunks: the model chunks.
    """
    params = [param for chunk in chunks for param in chunk.parameters() if param.requires_grad]
    scales = config.fp16 and config.loss_scale is None
    return unused_settings(
        Use(config, params, routing, chunks, ProcessGroupCollection(), scales_dynamically=scales)
    )


def unused_settings(use: Use) -> tuple[str, ...]:
    """Return one sentence for every setting that was given and changes nothing, sorted.

    Args:
        use: the configuration, and what it is used for.
    """
    found = [*_dtypes(use), *_scaling(use), *_overrides(use), *unread_by_optimizers(use)]
    found += [use.says(name, why) for name, why in use.by_runners.items()]
    if use.config.stochastic_state_rounding and not _keeps_bytes(use):
        found.append(use.says("stochastic_state_rounding", "no state is kept in 8 bits (uint8)"))
    if not (use.config.skip_nonfinite_steps or use.config.bf16):
        found.append(use.says("skip_nonfinite_steps", "only mixed precision skips such steps"))
    if not use.config.optimizer_cpu_offload:
        found += use.says_of_set(_OF_OFFLOAD, "optimizer_cpu_offload is False")
    if use.config.read_before_step and all(
        param.device.type == "cpu" for chunk in use.chunks for param in chunk.parameters()
    ):
        found.append(use.says("read_before_step", "the host reads before every step here in any case"))
    if use.config.barrier_with_L1_time and use.config.timers is None:
        found.append(use.says("barrier_with_L1_time", "there are no timers"))
    return tuple(sorted(found))


def warn_of_unused(sentences: Collection[str]) -> None:
    """Warn once of all settings that change nothing.

    Args:
        sentences: what :func:`unused_settings` returned.
    """
    if sentences:
        warn_user(
            f"settings that change nothing here: {'; '.join(sentences)}",
            UnusedSettingWarning,
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
    names_dtype = any(map(use.is_set, AWARE_DTYPES)) or use.governing & set(config.plugin_settings)
    if config.use_precision_aware_optimizer and not mixed and not names_dtype:
        yield use.says("use_precision_aware_optimizer", "every dtype is float32 and so is the step")


def _keeps_bytes(use: Use) -> bool:
    return use.config.use_precision_aware_optimizer and any(
        parse_dtype(getattr(use.config, key)) == torch.uint8 for key in use.governing
    )


def _scaling(use: Use) -> Iterator[str]:
    why = "only a dynamic loss scale reads it, which fp16=True without loss_scale has"
    if not use.scales_dynamically:
        yield from use.says_of_set(_SCALING, why)


def _overrides(use: Use) -> Iterator[str]:
    """Yield what overrides say that nothing reads, and what only the standard ones read where they match nothing."""
    config, routing = use.config, use.routing
    if config.decoupled_min_lr is not None and config.decoupled_lr is None:
        yield use.says("decoupled_min_lr", "decoupled_lr is not set")
    if routing is None:
        why = "overrides choose groups, and the wrapped optimizer has its own"
        yield from use.says_of_set(_OF_OVERRIDES, why)
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
