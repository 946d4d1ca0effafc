"""Which distribution brings what: the one module of the core that knows plugins by name.

The registry consults it only when something is missing, to say what to install; nothing that is installed is found
through it. Names that are not listed here work just as well.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from megaopt_core.errors import MovedNameError, warn_user

__all__ = [
    "BUFFERS",
    "CHECKPOINT_READER",
    "DEFAULT_OPTIMIZER",
    "GUARDS",
    "LEFT_NAMES",
    "OFFERED",
    "PRECISION_AWARE",
    "REFERENCE_ALIASES",
    "REFERENCE_SETTINGS",
    "RESOLVER",
    "ROLE_READER",
    "SETTING_PREFIXES",
    "STATE_LEARNER",
    "STEP_RUNNER",
    "TOOLS",
    "deprecated_alias",
    "distribution_of",
    "prefix_of_setting",
    "require_here",
]

DEFAULT_OPTIMIZER = "adam"
"""The optimizer of a configuration that names none."""

ROLE_READER = "megaopt-roles"
"""The distribution that reads what the parameters of a model are."""

CHECKPOINT_READER = "megaopt-checkpoint"
"""The distribution that reads checkpoints."""

GUARDS = "megaopt-guards"
"""The distribution whose step observers compare ranks."""

BUFFERS = "megaopt-distributed"
"""The distribution that checks models whose gradients lie in buffers."""

STEP_RUNNER = "megaopt-device"
"""The distribution that runs inner steps otherwise than in place."""

TOOLS = "megaopt-tools"
"""The distribution that is the program `megaopt`, reads files, and knows what others call a setting."""

RESOLVER = "megaopt-bridge"
"""The distribution that resolves names such as `torch:NAdam`."""

STATE_LEARNER = RESOLVER
"""The distribution that learns the state of classes that no entry describes."""

PRECISION_AWARE = "precision_aware"
"""The policy that `use_precision_aware_optimizer=True` asks for."""

OFFERED: Mapping[str, Mapping[str, str]] = {
    "optimizer": {
        "adam": "megaopt-adam",
        "adamw": "megaopt-adam",
        "sgd": "megaopt-adam",
        "muon": "megaopt-muon",
        "adaptive_muon": "megaopt-muon",
        "lion": "megaopt-lion",
        "soap": "megaopt-soap",
    },
    "strategy": {
        "distributed": "megaopt-distributed",
        "layer_wise": "megaopt-layerwise",
        "fsdp": "megaopt-fsdp",
    },
    "precision": {PRECISION_AWARE: "megaopt-lowbit"},
    "schedule": {},
}
"""Kind to name to the distribution that brings it."""

_REFERENCE_SETTINGS: Mapping[str, tuple[str, ...]] = {
    "adam": ("beta1", "beta2", "eps"),
    "sgd": ("momentum",),
    "muon": (
        *("momentum", "split_qkv", "nesterov", "scale_mode", "fp32_matmul_prec", "coefficient_type"),
        *("num_ns_steps", "tp_mode", "extra_scale_factor", "scalar_optimizer"),
    ),
    "lion": ("beta1", "beta2"),
    "soap": ("shampoo_beta", "precondition_frequency", "use_kl_shampoo"),
    "adaptive_muon": ("moment2_method", "beta2", "eps"),
}
"""Prefix to the settings that Megatron-style trainers have under it."""

SETTING_PREFIXES: Mapping[str, str] = {
    **{prefix: OFFERED["optimizer"][prefix] for prefix in _REFERENCE_SETTINGS},
    **dict.fromkeys(
        ("emerging", "heavyball", "po", "prodigyopt", "schedulefree", "torch", "torchao"), RESOLVER
    ),
}
"""Prefix of a setting to the distribution that owns it."""

REFERENCE_SETTINGS = tuple(
    f"{prefix}_{name}" for prefix, names in _REFERENCE_SETTINGS.items() for name in names
)
"""Fields that are part of the configuration in Megatron-style trainers and belong to plugins here."""

REFERENCE_ALIASES: Mapping[str, str] = {
    "AdamOptimizerConfig": "OptimizerConfig",
    "SGDOptimizerConfig": "OptimizerConfig",
}
"""Old public names that `megaopt_core` still answers to, with a `DeprecationWarning`, and what they stand for."""


def prefix_of_setting(name: str, known: Iterable[str] = SETTING_PREFIXES) -> str | None:
    """Return the longest known prefix that a setting has; None where it has none.

    Args:
        name: full name of the setting.
        known: prefixes.

    Example:
        >>> prefix_of_setting("adaptive_muon_eps")
        'adaptive_muon'
    """
    return max((prefix for prefix in known if name.startswith(f"{prefix}_")), key=len, default=None)


def distribution_of(kind: str, name: str) -> str | None:
    """Return the distribution of ours that brings something; None where none is known to.

    Args:
        kind: `"optimizer"`, `"strategy"`, `"schedule"`, `"precision"` or `"setting"`.
        name: its name; an optimizer's may be one such as `torch:NAdam`, a setting is known by its prefix.

    Example:
        >>> distribution_of("setting", "adaptive_muon_eps")
        'megaopt-muon'
        >>> distribution_of("setting", "clip_grad") is None
        True
    """
    if kind == "setting":
        prefix = prefix_of_setting(name)
        return None if prefix is None else SETTING_PREFIXES[prefix]
    return OFFERED[kind].get(name) or (RESOLVER if kind == "optimizer" and ":" in name else None)


LEFT_NAMES: Mapping[str, str] = {
    "DistributedDataParallel": "megaopt-distributed",
    "DistributedDataParallelConfig": "megaopt-distributed",
    "LayerWiseDistributedOptimizer": "megaopt-layerwise",
    "LoadReport": "megaopt-checkpoint",
    "TensorParallelAdaptiveMuon": "megaopt-muon",
    "TensorParallelMuon": "megaopt-muon",
    "get_supported_coefficient_types": "megaopt-muon",
    "load_checkpoint": "megaopt-checkpoint",
    "plan_full_param_layout": "megaopt-distributed",
    "save_checkpoint": "megaopt-checkpoint",
    "validate_coefficient_type": "megaopt-muon",
}
"""Public name that one may look for in `megaopt_core` to the distribution that has it."""


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
    warn_user(f"{name} is deprecated: use {REFERENCE_ALIASES[name]}", DeprecationWarning)
    return REFERENCE_ALIASES[name]
