"""The fields of `OptimizerConfig` that need no plugin: name, type, default, check and help of each."""

# ruff: noqa: RUF009 - the helpers return attrs fields

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from attrs import define, evolve, fields, frozen
from attrs.validators import optional

from megaopt_core.config._dtypes import FLOAT_DTYPES, STATE_DTYPES, shown
from megaopt_core.config._validators import (
    AT_LEAST_ZERO,
    FP32_SCALE,
    FRACTION,
    FUNCTION_OR_NONE,
    NAME,
    TEXT,
    WHOLE_COUNT,
    default_only,
    dtype_setting,
    limit_setting,
    not_negative,
    positive,
    setting,
    switch,
    whole_number,
)
from megaopt_core.errors import ConfigurationError
from megaopt_core.registry._catalogue import DEFAULT_OPTIMIZER

__all__ = ["AWARE_DTYPES", "CORE_FIELD_NAMES", "CoreFieldInfo", "CoreFields", "core_field_info"]

_SCALE = evolve(positive(), then=FP32_SCALE)

_NO_FP8 = "megaopt does not train with fp8 parameters"


@define(slots=False, kw_only=True, eq=False, repr=False)
class CoreFields:
    """What every configuration has, whichever plugins are installed."""

    optimizer: str = setting(
        DEFAULT_OPTIMIZER, NAME, "Name of the optimizer; `megaopt optimizers` lists the installed ones."
    )
    lr: float | None = setting(
        None,
        optional(not_negative()),
        "Peak learning rate. None: each optimizer's own default, if it has one.",
    )
    min_lr: float | None = setting(
        None, optional(not_negative()), "Lower bound of the learning rate in a schedule."
    )
    decoupled_lr: float | None = setting(
        None, optional(not_negative()), "Learning rate of embeddings and output heads. None: they use `lr`."
    )
    decoupled_min_lr: float | None = setting(
        None, optional(not_negative()), "`min_lr` of embeddings and output heads, if `decoupled_lr` is set."
    )
    weight_decay: float = setting(
        0.01, not_negative(), "Weight decay; each group multiplies it by its `wd_mult`."
    )
    decoupled_weight_decay: bool = switch(
        default=True,
        help="Shrink the weights directly instead of adding to the gradient, in optimizers that read this.",
    )
    cautious_weight_decay: bool = switch(
        "Shrink only those weights that the update moves towards zero, in optimizers that read this."
    )
    apply_wd_to_qk_layernorm: bool = switch(
        "Decay the layer norms of queries and keys too. By default they have no weight decay, like all vectors."
    )
    clip_grad: float = setting(
        1.0, AT_LEAST_ZERO, "Largest global L2 norm of the gradients; 0 does not clip."
    )
    grad_norm_skip_threshold: float = limit_setting(
        "Skip a step whose global gradient norm is above this, or NaN; `inf` skips none."
    )
    skip_nonfinite_steps: bool = switch(
        default=True,
        help="In mixed precision, skip a step with a gradient that is not finite. False, with bf16: make the step, "
        "as in fp32; on an accelerator the host then reads nothing before a step.",
    )
    read_before_step: bool = switch(
        "On an accelerator, let the host read votes and norms before every step, as on a CPU: errors then come in the "
        "step that they are about, not one step later."
    )
    log_num_zeros_in_grad: bool = switch("Count the zeros in the gradients at every step.")

    sharding: str | None = setting(
        None,
        optional(NAME),
        "Sharding strategy over the data-parallel ranks. None: a strategy that claims the model, else no sharding.",
    )
    use_distributed_optimizer: bool = switch(
        "Another way to write `sharding='distributed'`: each rank steps its share of the elements."
    )
    use_layer_wise_distributed_optimizer: bool = switch(
        "Another way to write `sharding='layer_wise'`: each rank steps whole tensors."
    )
    peers_per_matrix: int | None = setting(
        None,
        optional(whole_number(1)),
        "Number of ranks that step one matrix together, if strategy and optimizer support it. None: the strategy's "
        "cost model chooses; 1: every matrix is stepped whole.",
    )
    overlap_param_gather: bool = switch(
        "Gather updated parameters while the forward pass computes; give DDP the same value."
    )
    overlap_param_gather_with_optimizer_step: bool = switch(
        "Step bucket by bucket, gathering each while the next is stepped."
    )

    fp16: bool = switch("Train an fp16 model with fp32 main parameters and loss scaling.")
    bf16: bool = switch("Train a bf16 model with fp32 main parameters.")
    params_dtype: torch.dtype = dtype_setting(
        FLOAT_DTYPES,
        "Expected dtype of the model's weights: a warning tells if no weight has it; nothing is cast.",
    )
    precision: str | None = setting(
        None,
        optional(NAME),
        "Precision policy, by name. None: the policy for `fp16`, `bf16` and `use_precision_aware_optimizer`.",
    )
    use_precision_aware_optimizer: bool = switch(
        "Keep main parameters, main gradients and optimizer states in the four dtypes below (megaopt-lowbit)."
    )
    store_param_remainders: bool = switch(
        default=True,
        help="With a precision-aware optimizer on bf16 parameters: keep only the low 16 bits of each fp32 main "
        "parameter; the high bits are the parameter itself.",
    )
    main_grads_dtype: torch.dtype = dtype_setting(
        STATE_DTYPES, "Dtype of main gradients (precision-aware optimizer)."
    )
    main_params_dtype: torch.dtype = dtype_setting(
        STATE_DTYPES, "Dtype of main parameters (precision-aware optimizer)."
    )
    exp_avg_dtype: torch.dtype = dtype_setting(
        STATE_DTYPES, "Dtype of the first moment (precision-aware optimizer)."
    )
    exp_avg_sq_dtype: torch.dtype = dtype_setting(
        STATE_DTYPES, "Dtype of the second moment (precision-aware optimizer)."
    )
    stochastic_state_rounding: bool = switch(
        "Round states of 8 bits up or down at random, so that no small change is lost on average."
    )

    loss_scale: float | None = setting(
        None, optional(_SCALE), "Constant loss scale. None: dynamic scaling with fp16, none with bf16."
    )
    initial_loss_scale: float = setting(float(2**32), _SCALE, "First value of the dynamic loss scale.")
    min_loss_scale: float = setting(1.0, _SCALE, "Smallest dynamic loss scale.")
    loss_scale_window: float = setting(
        1000, WHOLE_COUNT, "Steps without overflow after which the dynamic loss scale grows."
    )
    hysteresis: int = setting(2, whole_number(1), "Overflows after which the dynamic loss scale falls.")

    barrier_with_L1_time: bool = switch(  # noqa: N815 - an established name
        "Wait for all ranks before and after each measurement of a timer of level 1."
    )
    timers: Callable[..., Any] | None = setting(
        None, FUNCTION_OR_NONE, "Function from name and log level to a timer; left out of files and pickles."
    )
    config_logger_dir: str = setting(
        "", TEXT, "Folder into which configurations are written; empty: nowhere."
    )

    fp8_recipe: str | None = default_only(default=None, why=_NO_FP8, help="Recipe of fp8 training.")
    reuse_grad_buf_for_mxfp8_param_ag: bool = default_only(
        default=False, why=_NO_FP8, help="Gather mxfp8 parameters through the gradient buffer."
    )
    optimizer_cpu_offload: bool = switch(
        "Keep optimizer states in CPU memory; optimizers that work element by element also step there "
        "(megaopt-device)."
    )
    optimizer_offload_fraction: float = setting(
        0.0,
        FRACTION,
        "Share of each optimizer's bytes that `optimizer_cpu_offload` keeps on the CPU: whole pieces, largest first.",
    )
    use_torch_optimizer_for_cpu_offload: bool = switch(
        "Step the parameters on the CPU with torch's class of the same optimizer."
    )
    overlap_cpu_optimizer_d2h_h2d: bool = switch("Copy to and from the CPU while other pieces are stepped.")
    pin_cpu_grads: bool = switch(default=True, help="Pin the memory of gradients on the CPU.")
    pin_cpu_params: bool = switch(default=True, help="Pin the memory of parameters and states on the CPU.")
    optimizer_cuda_graph: bool = switch("Replay the optimizer step as a CUDA graph (megaopt-device).")

    def __attrs_post_init__(self) -> None:
        _check_together(self)


CORE_FIELD_NAMES = tuple(attribute.name for attribute in fields(CoreFields))
"""Names of the core's fields, in their order."""

AWARE_DTYPES = ("main_grads_dtype", "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")
"""The dtypes that only a precision-aware optimizer has."""

_ORDERED = (("min_lr", "lr"), ("decoupled_min_lr", "decoupled_lr"), ("min_loss_scale", "initial_loss_scale"))
"""Settings of which the first must not be above the second."""


def _check_together(config: CoreFields) -> None:
    """Raise for values that contradict each other."""
    if config.fp16 and config.bf16:
        raise ConfigurationError(
            "fp16=True and bf16=True: at most one of them can be True", setting="fp16", value=True
        )
    if config.precision is not None and config.use_precision_aware_optimizer:
        raise _refused(
            config, "precision", "use_precision_aware_optimizer=True asks for a policy too; keep one of them"
        )
    offloads = config.optimizer_cpu_offload
    if offloads and not config.optimizer_offload_fraction:
        raise _refused(
            config,
            "optimizer_cpu_offload",
            "offloads optimizer_offload_fraction=0.0 of the states, which is nothing; set the fraction, 1.0 for all "
            "of them",
        )
    if offloads and config.optimizer_cuda_graph:
        raise _refused(
            config,
            "optimizer_cuda_graph",
            "a graph captures the work of the device, but optimizer_cpu_offload=True gives a part of the step to the "
            "CPU; choose one",
        )
    if not config.skip_nonfinite_steps and (config.fp16 or config.loss_scale is not None):
        raise _refused(
            config,
            "skip_nonfinite_steps",
            "gradients of a scaled loss overflow now and then (fp16, loss_scale); False is possible with bf16 "
            "without a loss scale",
        )
    for low, high in _ORDERED:
        least, most = getattr(config, low), getattr(config, high)
        if least is not None and most is not None and least > most:
            raise _refused(config, low, f"must not be above {high}={most!r}")
    for name in () if config.use_precision_aware_optimizer else AWARE_DTYPES:
        if getattr(config, name) != torch.float32:
            raise _refused(config, name, "must be 'float32' unless use_precision_aware_optimizer=True")


def _refused(config: CoreFields, name: str, why: str) -> ConfigurationError:
    value = getattr(config, name)
    return ConfigurationError.of(name, value, why, shown=shown(value))


@frozen
class CoreFieldInfo:
    """What is to be known about one core field.

    Args:
        name: the field's name.
        type: its annotated type.
        default: its default.
        help: what it does.
    """

    name: str
    type: str
    default: Any
    help: str


def core_field_info() -> tuple[CoreFieldInfo, ...]:
    """Return name, type, default and help of every core field, in their order.

    Example:
        >>> core_field_info()[1].name, core_field_info()[1].type
        ('lr', 'float | None')
    """
    return tuple(
        CoreFieldInfo(attribute.name, str(attribute.type), attribute.default, attribute.metadata["help"])
        for attribute in fields(CoreFields)
    )
