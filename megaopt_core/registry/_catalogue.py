"""Which distribution brings what: the one module of the core that knows plugins by name.

The registry consults it only when something is missing, to say what to install; nothing that is installed is found
through it. Names that are not listed here work just as well.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from types import MappingProxyType

from megaopt_core.errors import MovedNameError

__all__ = [
    "CHECKPOINT_READER",
    "COMMANDS",
    "DEFAULT_OPTIMIZER",
    "DISTRIBUTED_STRATEGIES",
    "EXAMPLES",
    "EXPLAIN_PAGE",
    "FOREIGN_SETTINGS",
    "LAYER_WISE_STRATEGIES",
    "LEFT_NAMES",
    "OPTIMIZERS",
    "REFERENCE_ALIASES",
    "REFERENCE_SETTINGS",
    "RESOLVER",
    "ROLE_READER",
    "SETTING_PREFIXES",
    "STEP_RUNNER",
    "STRATEGIES",
    "deprecated_alias",
    "distribution_of_setting",
    "require_here",
]

DEFAULT_OPTIMIZER = "adam"
"""The optimizer of a configuration that names none."""

ROLE_READER = "megaopt-roles"
"""The distribution that reads what the parameters of a model are."""

CHECKPOINT_READER = "megaopt-checkpoint"
"""The distribution that reads checkpoints."""

STEP_RUNNER = "megaopt-device"
"""The distribution that runs inner steps otherwise than in place."""

COMMANDS: Mapping[str, str] = MappingProxyType(
    {
        "check-plugin": "megaopt-testing",
        "compare": "megaopt-tools",
        "completion": "megaopt-tools",
        "convert": "megaopt-checkpoint",
        "describe": "megaopt-tools",
        "new-plugin": "megaopt-testing",
        "schedule": "megaopt-tools",
        "train": "megaopt-tools",
        "verify-checkpoint": "megaopt-checkpoint",
        "calibrate": "megaopt-muon",
    }
)
"""Command to the distribution that brings it."""

EXAMPLES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "plugins": ("megaopt plugins", "megaopt plugins --load"),
        "optimizers": ("megaopt optimizers", "megaopt optimizers muon"),
        "explain": (
            "megaopt explain my_model.py:build --optimizer muon",
            "megaopt explain my_model:Model --config run.toml --set lr=3e-4",
        ),
    }
)
"""Command of the core to the examples at the end of its `--help`."""

RESOLVER = "megaopt-bridge"
"""The distribution that resolves names such as `torch:NAdam`."""

EXPLAIN_PAGE = "megaopt-tools"
"""The distribution that draws the page of `megaopt explain --html`."""

OPTIMIZERS: Mapping[str, str] = MappingProxyType(
    {
        "adam": "megaopt-adam",
        "adamw": "megaopt-adam",
        "sgd": "megaopt-adam",
        "muon": "megaopt-muon",
        "adaptive_muon": "megaopt-muon",
        "lion": "megaopt-lion",
        "soap": "megaopt-soap",
    }
)
"""Optimizer name to the distribution that brings it."""

STRATEGIES: Mapping[str, str] = MappingProxyType(
    {
        "distributed": "megaopt-distributed",
        "zero1": "megaopt-distributed",
        "layer_wise": "megaopt-layerwise",
        "fsdp": "megaopt-fsdp",
    }
)
"""Sharding strategy to the distribution that brings it."""

DISTRIBUTED_STRATEGIES = ("distributed", "zero1")
"""What `use_distributed_optimizer=True` means: the name, then its aliases."""

LAYER_WISE_STRATEGIES = ("layer_wise",)
"""What `use_layer_wise_distributed_optimizer=True` means."""

SETTING_PREFIXES: Mapping[str, str] = MappingProxyType(
    {
        "adam": "megaopt-adam",
        "sgd": "megaopt-adam",
        "muon": "megaopt-muon",
        "adaptive_muon": "megaopt-muon",
        "lion": "megaopt-lion",
        "soap": "megaopt-soap",
        **dict.fromkeys(
            ("emerging", "heavyball", "po", "prodigyopt", "schedulefree", "torch", "torchao"), RESOLVER
        ),
    }
)
"""Prefix of a setting to the distribution that owns it."""

REFERENCE_SETTINGS = (
    "adam_beta1",
    "adam_beta2",
    "adam_eps",
    "sgd_momentum",
    "muon_momentum",
    "muon_split_qkv",
    "muon_nesterov",
    "muon_scale_mode",
    "muon_fp32_matmul_prec",
    "muon_coefficient_type",
    "muon_num_ns_steps",
    "muon_tp_mode",
    "muon_extra_scale_factor",
    "muon_scalar_optimizer",
    "lion_beta1",
    "lion_beta2",
    "soap_shampoo_beta",
    "soap_precondition_frequency",
    "soap_use_kl_shampoo",
    "adaptive_muon_moment2_method",
    "adaptive_muon_beta2",
    "adaptive_muon_eps",
)
"""Fields that are part of the configuration in Megatron-style trainers and belong to plugins here."""

FOREIGN_SETTINGS: Mapping[str, str] = MappingProxyType(
    {
        "adam_epsilon": "adam_eps",
        "adam_lr": "muon_scalar_lr",
        "adam_w_mode": "decoupled_weight_decay",
        "adam_weight_decay": "muon_scalar_weight_decay",
        "adamw_betas": "adam_beta1 and adam_beta2",
        "adamw_eps": "adam_eps",
        "adamw_lr": "muon_scalar_lr",
        "adamw_wd": "muon_scalar_weight_decay",
        "adjust_lr_fn": "muon_scale_mode (with muon_extra_scale_factor)",
        "adamw_mode": "decoupled_weight_decay",
        "backend": "muon_ns_method",
        "backend_steps": "muon_num_ns_steps",
        "backup_lr": "muon_scalar_lr",
        "beta": "muon_momentum, sgd_momentum, or adam_beta1 and adam_beta2",
        "beta1": "adam_beta1",
        "beta2": "adam_beta2",
        "betas": "adam_beta1 and adam_beta2",
        "cautious": "cautious_weight_decay",
        "cautious_wd": "cautious_weight_decay",
        "clip": "clip_grad",
        "clip_grad_norm": "clip_grad",
        "clip_threshold": "clip_grad",
        "embed_lr": "decoupled_lr",
        "embedding_lr": "decoupled_lr",
        "eps": "adam_eps",
        "epsilon": "adam_eps",
        "final_lr": "min_lr",
        "grad_clip": "clip_grad",
        "gradient_clip_val": "clip_grad",
        "head_lr": "decoupled_lr",
        "learning_rate": "lr",
        "lr": "lr",
        "matrix_lr": "lr",
        "max_grad_norm": "clip_grad",
        "max_norm": "clip_grad",
        "momentum": "muon_momentum or sgd_momentum",
        "mu": "muon_momentum",
        "nesterov": "muon_nesterov",
        "newton_schulz_steps": "muon_num_ns_steps",
        "ns_coefficients": "muon_coefficient_type, or muon_coefficients with the type 'custom'",
        "ns_iters": "muon_num_ns_steps",
        "ns_steps": "muon_num_ns_steps",
        "optim": "optimizer",
        "rate": "lr",
        "unembedding_lr": "decoupled_lr",
        "use_zero": "sharding",
        "wd": "weight_decay",
        "weight_decay": "weight_decay",
        "weight_decouple": "decoupled_weight_decay",
        "zero": "sharding",
        "zero_optimization": "sharding",
        "zero_stage": "sharding",
    }
)
"""Name of a setting in torch's optimizers and in others' scripts to what it is called here."""

REFERENCE_ALIASES: Mapping[str, str] = MappingProxyType(
    {"AdamOptimizerConfig": "OptimizerConfig", "SGDOptimizerConfig": "OptimizerConfig"}
)
"""Old public names that `megaopt_core` still answers to, with a `DeprecationWarning`, and what they stand for."""


def distribution_of_setting(name: str) -> str | None:
    """Return the distribution that owns a setting, by its longest known prefix; None when no prefix is known.

    Args:
        name: full name of the setting.

    Example:
        >>> distribution_of_setting("adaptive_muon_eps")
        'megaopt-muon'
        >>> distribution_of_setting("clip_grad") is None
        True
    """
    owners = [prefix for prefix in SETTING_PREFIXES if name.startswith(f"{prefix}_")]
    return SETTING_PREFIXES[max(owners, key=len)] if owners else None


LEFT_NAMES: Mapping[str, str] = MappingProxyType(
    {
        "DistributedDataParallel": "megaopt-distributed",
        "DistributedDataParallelConfig": "megaopt-distributed",
        "LoadReport": "megaopt-checkpoint",
        "load_checkpoint": "megaopt-checkpoint",
        "plan_full_param_layout": "megaopt-distributed",
        "save_checkpoint": "megaopt-checkpoint",
    }
)
"""Public name that `megaopt_core` does not have to the distribution that has it."""


def require_here(name: str) -> None:
    """Raise for a public name that another distribution brings.

    Args:
        name: a name that was asked of `megaopt_core`.

    Raises:
        MovedNameError: it has a home elsewhere; the message says where, and what to install.
    """
    distribution = LEFT_NAMES.get(name)
    if distribution is not None:
        package = distribution.replace("-", "_")
        raise MovedNameError(
            f"{name} comes with {distribution}: from {package} import {name} (pip install {distribution})",
            name=name,
            distribution=distribution,
        )


def deprecated_alias(name: str) -> str | None:
    """Return what an old public name stands for, and warn; None when it is none.

    Args:
        name: a name that was asked of `megaopt_core`.
    """
    if name not in REFERENCE_ALIASES:
        return None
    warnings.warn(f"{name} is deprecated: use {REFERENCE_ALIASES[name]}", DeprecationWarning, stacklevel=3)
    return REFERENCE_ALIASES[name]
