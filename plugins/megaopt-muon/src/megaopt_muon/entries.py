"""What Muon offers to megaopt, without importing an algorithm."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from megaopt_core.errors import ConfigurationError
from megaopt_core.params import Granularity, MatrixView, ParamSpec, Role
from megaopt_core.plugin_api import OptimizerEntry
from megaopt_core.routing import matrix_like_overrides, scaled_learning_rate
from megaopt_muon.choice.step_cost import step_cost
from megaopt_muon.settings import AdaptiveMuonSettings, MuonSettings
from megaopt_muon.unused import unused_settings

if TYPE_CHECKING:
    from megaopt_core.config import OptimizerConfig
    from megaopt_core.parallel import ProcessGroupCollection
    from megaopt_core.params import ParamGroupOverride, ParamKey

__all__ = ["optimizer_entries"]

_MOMENTUM = frozenset({torch.float32, torch.bfloat16, torch.float16, torch.uint8})


def _accepts(spec: ParamSpec, view: MatrixView | None) -> str | None:
    if view is None:
        return "not a hidden matrix"
    if spec.dtype.is_complex:
        return "complex matrices are not orthogonalized"
    if any(min(shape[-2:]) < 1 for shape in view.matrix_shapes(spec.shape)):
        return "a matrix without elements"
    return None


def _scalar_optimizer(config: OptimizerConfig) -> str:
    return str(config.muon_scalar_optimizer)


def _scalar_override(config: OptimizerConfig) -> ParamGroupOverride:
    """Return what `muon_scalar_lr` and `muon_scalar_weight_decay` say of the parameters that Muon does not take.

    `min_lr` follows in proportion, so that a schedule keeps its shape. Weight decay becomes a multiple of
    `weight_decay`, so that a schedule of that still reaches it.
    """
    override: ParamGroupOverride = {}
    lr, decay = config.muon_scalar_lr, config.muon_scalar_weight_decay
    if lr is not None:
        override["max_lr"] = lr
        if config.min_lr is not None and config.lr:
            override["min_lr"] = config.min_lr * lr / config.lr
    if decay is not None and decay != config.weight_decay:
        if not config.weight_decay:
            raise ConfigurationError(
                f"muon_scalar_weight_decay={decay} with weight_decay=0: it is kept as a multiple of weight_decay. Set "
                'weight_decay to it, and {ParamKey(role="matrix"): {"wd_mult": 0.0}} among the overrides',
                setting="muon_scalar_weight_decay",
                value=decay,
            )
        override["wd_mult"] = _multiple(decay, config.weight_decay)
    return override


def _multiple(decay: float, of: float) -> float:
    """Return a weight decay as a multiple of another one.

    Raises:
        ConfigurationError: no number is so large.
    """
    multiple = decay / of
    if multiple > sys.float_info.max:
        raise ConfigurationError(
            f"muon_scalar_weight_decay={decay} with weight_decay={of}: it is kept as a multiple of weight_decay, "
            "and no number is so large",
            setting="muon_scalar_weight_decay",
            value=decay,
        )
    return multiple


def _muon_kwargs(
    config: OptimizerConfig,
    model_chunks: Sequence[torch.nn.Module],
    pg_collection: ProcessGroupCollection | None,
) -> Mapping[str, Any]:
    """Return the constructor arguments of `TensorParallelMuon`."""
    del model_chunks  # how a parameter splits into matrices comes with the parameter
    return {
        "lr": config.lr,
        "momentum": config.muon_momentum,
        "nesterov": config.muon_nesterov,
        "weight_decay": config.weight_decay,
        "cautious_weight_decay": config.cautious_weight_decay,
        "use_decoupled_weight_decay": config.muon_use_decoupled_weight_decay,
        "split": config.muon_split,
        "split_qkv": config.muon_split_qkv,
        "fp32_matmul_prec": config.muon_fp32_matmul_prec,
        "coefficient_type": config.muon_coefficient_type,
        "num_ns_steps": config.muon_num_ns_steps,
        "scale_mode": config.muon_scale_mode,
        "extra_scale_factor": config.muon_extra_scale_factor,
        "pg_collection": pg_collection,
        "tp_mode": config.muon_tp_mode,
        "norm_eps": config.muon_eps,
        "ns_method": config.muon_ns_method,
        "coefficients": config.muon_coefficients,
    }


def _adaptive_muon_kwargs(
    config: OptimizerConfig,
    model_chunks: Sequence[torch.nn.Module],
    pg_collection: ProcessGroupCollection | None,
) -> Mapping[str, Any]:
    """Return the constructor arguments of `TensorParallelAdaptiveMuon`."""
    return {
        **_muon_kwargs(config, model_chunks, pg_collection),
        "moment2_method": config.adaptive_muon_moment2_method,
        "beta2": config.adaptive_muon_beta2,
        "eps": config.adaptive_muon_eps,
    }


def _refuses_split(config: OptimizerConfig) -> str | None:
    if config.adaptive_muon_moment2_method == "namo":
        return "its second moment 'namo' measures whole gradients, which do not travel"
    return None


def _refuses_peers(config: OptimizerConfig) -> str | None:
    if config.adaptive_muon_moment2_method != "adamuon":
        return "its second moment has one value for several elements, some of which other ranks would have"
    return None


def _init_state(optimizer: torch.optim.Optimizer, config: OptimizerConfig | None = None) -> None:
    from megaopt_muon.muon import init_state

    init_state(optimizer, config)


def _param_notes(optimizer: torch.optim.Optimizer) -> Mapping[str, str]:
    from megaopt_muon.notes import param_notes

    return param_notes(optimizer)


def _agree(optimizer: torch.optim.Optimizer, pg_collection: ProcessGroupCollection) -> None:
    optimizer.agree(pg_collection)  # type: ignore[attr-defined] # the entry pairs this function with its class


def _leave_matrices_alone(
    config: OptimizerConfig, mup_width_mult: float
) -> Mapping[ParamKey, ParamGroupOverride]:
    """Return `lr/m` for matrix-like parameters that Muon does not step; its own updates have the right size."""
    if config.muon_scale_mode == "spectral":
        warnings.warn(
            "muP with muon_scale_mode='spectral': updates grow with the width; only 'unit_rms_norm' does not "
            "depend on it",
            stacklevel=4,
        )
    lr = config.muon_scalar_lr
    if lr is not None:
        min_lr = config.min_lr * lr / config.lr if config.min_lr is not None and config.lr else None
        config = config.replace(lr=lr, min_lr=min_lr)
    return matrix_like_overrides(
        config, scaled_learning_rate(config, 1.0 / mup_width_mult), but=(Role.MATRIX,)
    )


def optimizer_entries() -> Mapping[str, OptimizerEntry]:
    """Return the entries of `muon` and `adaptive_muon`."""
    return {
        "muon": OptimizerEntry(
            "megaopt_muon.muon:TensorParallelMuon",
            init_state_fn=_init_state,
            config_to_kwargs=_muon_kwargs,
            split_step="megaopt_muon.split_step:MuonSplit",
            supports_peers=True,
            settings=MuonSettings,
            setting_prefixes=("muon",),
            granularity=Granularity.TENSOR,
            accepts=_accepts,
            fallback=_scalar_optimizer,
            fallback_override=_scalar_override,
            step_cost=step_cost,
            state_dtypes={"momentum_buffer": _MOMENTUM},
            state_dtype_settings={"momentum_buffer": "muon_momentum_dtype"},
            mup=_leave_matrices_alone,
            agree=_agree,
            param_notes=_param_notes,
            unused_settings=unused_settings,
            description="orthogonalized momentum for hidden matrices (Newton-Schulz)",
            example='build_optimizer(model, "muon", lr=3e-4, muon_extra_scale_factor=0.2)',
        ),
        "adaptive_muon": OptimizerEntry(
            "megaopt_muon.adaptive:TensorParallelAdaptiveMuon",
            init_state_fn=_init_state,
            config_to_kwargs=_adaptive_muon_kwargs,
            split_step="megaopt_muon.split_step:AdaptiveMuonSplit",
            refuses_split=_refuses_split,
            supports_peers=True,
            refuses_peers=_refuses_peers,
            settings=AdaptiveMuonSettings,
            setting_prefixes=("adaptive_muon", "muon"),
            granularity=Granularity.TENSOR,
            accepts=_accepts,
            fallback=_scalar_optimizer,
            fallback_override=_scalar_override,
            step_cost=step_cost,
            state_dtypes={"momentum_buffer": _MOMENTUM},
            state_dtype_settings={"momentum_buffer": "muon_momentum_dtype"},
            mup=_leave_matrices_alone,
            agree=_agree,
            param_notes=_param_notes,
            unused_settings=unused_settings,
            description="Muon with a second moment after orthogonalization (AdaMuon, NorMuon, NAMO)",
            example='build_optimizer(model, "adaptive_muon", lr=3e-4, adaptive_muon_moment2_method="normuon")',
        ),
    }
