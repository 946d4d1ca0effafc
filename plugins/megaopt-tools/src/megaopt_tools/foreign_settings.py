"""Names that torch's optimizers and other scripts give to settings of ours."""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["FOREIGN_SETTINGS", "PREFIXES", "RESOLVER", "prefix_of_setting"]

RESOLVER = "megaopt-bridge"
"""The distribution that resolves names such as `torch:NAdam`."""

PREFIXES = (
    *("adam", "adamw", "sgd", "muon", "adaptive_muon", "lion", "soap"),
    *("emerging", "heavyball", "po", "prodigyopt", "schedulefree", "torch", "torchao"),
)
"""Prefixes of settings that belong to one optimizer, or to the classes of one package."""

_CALLED_ELSEWHERE: Mapping[str, tuple[str, ...]] = {
    "adam_beta1": ("beta1",),
    "adam_beta1 and adam_beta2": ("adamw_betas", "betas"),
    "adam_beta2": ("beta2",),
    "adam_eps": ("adam_epsilon", "adamw_eps", "eps", "epsilon"),
    "cautious_weight_decay": ("cautious", "cautious_wd"),
    "clip_grad": (
        "clip",
        "clip_grad_norm",
        "clip_threshold",
        "grad_clip",
        "gradient_clip_val",
        "max_grad_norm",
        "max_norm",
    ),
    "decoupled_lr": ("embed_lr", "embedding_lr", "head_lr", "unembedding_lr"),
    "decoupled_weight_decay": ("adam_w_mode", "adamw_mode", "weight_decouple"),
    "lr": ("learning_rate", "lr", "matrix_lr", "rate"),
    "min_lr": ("final_lr",),
    "muon_coefficient_type, or muon_coefficients with the type 'custom'": ("ns_coefficients",),
    "muon_momentum": ("mu",),
    "muon_momentum or sgd_momentum": ("momentum",),
    "muon_momentum, sgd_momentum, or adam_beta1 and adam_beta2": ("beta",),
    "muon_nesterov": ("nesterov",),
    "muon_ns_method": ("backend",),
    "muon_num_ns_steps": ("backend_steps", "newton_schulz_steps", "ns_iters", "ns_steps"),
    "muon_scalar_lr": ("adam_lr", "adamw_lr", "backup_lr"),
    "muon_scalar_weight_decay": ("adam_weight_decay", "adamw_wd"),
    "muon_scale_mode (with muon_extra_scale_factor)": ("adjust_lr_fn",),
    "optimizer": ("optim",),
    "sharding": ("use_zero", "zero", "zero_optimization", "zero_stage"),
    "weight_decay": ("wd", "weight_decay"),
}
"""Our name of a setting to its names in torch's optimizers and in other scripts."""

FOREIGN_SETTINGS: Mapping[str, str] = {
    foreign: ours for ours, names in _CALLED_ELSEWHERE.items() for foreign in names
}
"""Name of a setting in torch's optimizers and in others' scripts to what it is called here."""


def prefix_of_setting(name: str) -> str | None:
    """Return the longest known prefix that a setting has; None where it has none.

    Args:
        name: full name of the setting.

    Example:
        >>> prefix_of_setting("adaptive_muon_eps")
        'adaptive_muon'
    """
    return max((prefix for prefix in PREFIXES if name.startswith(f"{prefix}_")), key=len, default=None)
