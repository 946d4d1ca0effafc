"""The settings of Muon and of adaptive Muon, as they appear on `OptimizerConfig`."""

from __future__ import annotations

from typing import Any

import torch
from attrs import Attribute, field, frozen
from attrs.validators import optional

from megaopt_core.config import STATE_DTYPES, between, not_negative, one_of, parse_dtype, positive
from megaopt_core.errors import ConfigurationError
from megaopt_muon.coefficients import MOST_STEPS, STEPS, as_triples
from megaopt_muon.scale import SCALE_MODES

__all__ = [
    "MATMUL_PRECISIONS",
    "NS_METHODS",
    "SCALAR_OPTIMIZERS",
    "SPLITS",
    "TP_MODES",
    "AdaptiveMuonSettings",
    "MuonSettings",
]

MATMUL_PRECISIONS = ("highest", "high", "medium")
NS_METHODS = ("auto", "standard", "gram")
SCALAR_OPTIMIZERS = ("adam", "lion")
SPLITS = ("fused", "per_head", "none")
TP_MODES = ("blockwise", "duplicated", "distributed", "auto")


def _refuse(attribute: Attribute[Any], value: Any, allowed: str) -> ConfigurationError:
    return ConfigurationError.of(attribute.name, value, f"must be {allowed}")


def _coefficient_types() -> tuple[str, ...]:
    from megaopt_muon.coefficients import get_supported_coefficient_types

    return get_supported_coefficient_types()


def _coefficient_type(_instance: Any, attribute: Attribute[Any], value: Any) -> None:
    if not isinstance(value, str):
        raise _refuse(attribute, value, "the name of a coefficient set")
    if value == attribute.default:
        return  # the names come from emerging-optimizers, whose import takes seconds
    from megaopt_muon.coefficients import validate_coefficient_type

    validate_coefficient_type(value)


def _coefficients(instance: MuonSettings, attribute: Attribute[Any], value: Any) -> None:
    if (value is None) == (instance.coefficient_type == "custom"):
        allowed = "a sequence of (a, b, c) with muon_coefficient_type='custom', else None"
        raise _refuse(attribute, value, allowed)
    if value is not None and not as_triples(value):
        raise _refuse(attribute, value, "a sequence of one or more (a, b, c), each of three numbers")


def _triples(value: Any) -> Any:
    """Return numbers as floats; what has another shape is left to the validator."""
    triples = as_triples(value)
    return value if triples is None else triples


def _moment2_method(_instance: Any, attribute: Attribute[Any], value: Any) -> None:
    if value == attribute.default:
        return  # as for the coefficient type
    from megaopt_muon.moments import validate_moment2_method

    validate_moment2_method(value)


@frozen(kw_only=True)
class MuonSettings:
    """What can be set about Muon; a field `x` is `muon_x` on the configuration.

    Example:
        >>> MuonSettings(momentum=0.9).num_ns_steps
        5
    """

    momentum: float = field(
        default=0.95,
        validator=between(0.0, 1.0),
        metadata={"help": "decay rate of the momentum, an exponential moving average of the gradient"},
    )
    momentum_dtype: torch.dtype = field(
        default=torch.float32,
        converter=parse_dtype,
        validator=one_of(STATE_DTYPES),
        metadata={"help": "dtype in which the momentum is kept (precision-aware optimizer)"},
    )
    nesterov: bool = field(
        default=False,
        validator=one_of((True, False)),
        metadata={"help": "look one step of momentum ahead (Nesterov)"},
    )
    use_decoupled_weight_decay: bool = field(
        default=True,
        validator=one_of((True, False)),
        metadata={
            "help": "shrink the weights directly (as AdamW does) instead of adding to the gradient (L2)"
        },
    )
    split: str = field(
        default="fused",
        validator=one_of(SPLITS),
        metadata={
            "help": "fused: each matrix of a fused weight by itself; per_head: each attention head too; none: weights "
            "as they are stored"
        },
    )
    split_qkv: bool = field(
        default=True,
        validator=one_of((True, False)),
        metadata={"help": "orthogonalize query, key and value of a fused weight separately"},
    )
    fp32_matmul_prec: str = field(
        default="medium",
        validator=one_of(MATMUL_PRECISIONS),
        metadata={
            "help": "medium: Newton-Schulz in 16 bits where that is fast; high: TF32 where there is; highest: float32"
        },
    )
    coefficient_type: str = field(
        default="quintic",
        validator=_coefficient_type,
        metadata={
            "help": "coefficient set of Newton-Schulz, one of those in the installed emerging-optimizers",
            "choices": _coefficient_types,
        },
    )
    num_ns_steps: int = field(
        default=5,
        validator=STEPS,
        metadata={"help": f"number of Newton-Schulz iterations, 1 to {MOST_STEPS}"},
    )
    scale_mode: str = field(
        default="spectral",
        validator=one_of(tuple(SCALE_MODES)),
        metadata={
            "help": "scale of the update by the shape of its matrix: spectral, unit_rms_norm or shape_scaling"
        },
    )
    extra_scale_factor: float = field(
        default=1.0,
        validator=positive(),
        metadata={"help": "factor on every update; 0.2 with spectral matches the size of AdamW's"},
    )
    tp_mode: str = field(
        default="blockwise",
        validator=one_of(TP_MODES),
        metadata={
            "help": "tensor parallel matrices: blockwise (each shard alone), duplicated or distributed (exact), or "
            "auto: the faster of these two for each weight"
        },
    )
    scalar_optimizer: str = field(
        default="adam",
        validator=one_of(SCALAR_OPTIMIZERS),
        metadata={"help": "optimizer of the other parameters (embeddings, biases, norms): adam or lion"},
    )
    scalar_lr: float | None = field(
        default=None,
        validator=optional(not_negative()),
        metadata={"help": "learning rate of the parameters that scalar_optimizer steps; None: lr"},
    )
    scalar_weight_decay: float | None = field(
        default=None,
        validator=optional(not_negative()),
        metadata={
            "help": "weight decay of the parameters that scalar_optimizer steps and decays; None: weight_decay"
        },
    )
    eps: float = field(
        default=1e-15,
        validator=positive(),
        metadata={"help": "smallest Frobenius norm that an update is divided by before Newton-Schulz"},
    )
    ns_method: str = field(
        default="auto",
        validator=one_of(NS_METHODS),
        metadata={"help": "computation of Newton-Schulz: auto (the cheaper one by shape), standard or gram"},
    )
    coefficients: tuple[tuple[float, float, float], ...] | None = field(
        default=None,
        converter=_triples,
        validator=_coefficients,
        metadata={"help": "coefficients (a, b, c) of each step, with muon_coefficient_type custom"},
    )


@frozen(kw_only=True)
class AdaptiveMuonSettings:
    """What adaptive Muon adds to Muon's settings; a field `x` is `adaptive_muon_x` on the configuration.

    Example:
        >>> AdaptiveMuonSettings().moment2_method
        'adamuon'
    """

    moment2_method: str = field(
        default="adamuon",
        validator=_moment2_method,
        metadata={
            "help": "second moment: adamuon (per element), normuon (per row or column) or namo (per matrix)"
        },
    )
    beta2: float = field(
        default=0.95,
        validator=between(0.0, 1.0),
        metadata={"help": "decay rate of the second moment"},
    )
    eps: float = field(
        default=1e-8,
        validator=positive(),
        metadata={"help": "keeps the division by the second moment finite"},
    )
