"""What the constructors of Muon refuse."""

from __future__ import annotations

import math
from typing import Any

from megaopt_core.plugin_api import require_argument
from megaopt_muon.scale import validate_scale_mode
from megaopt_muon.settings import MATMUL_PRECISIONS, NS_METHODS, SPLITS, TP_MODES

__all__ = ["validate_arguments"]


def validate_arguments(
    *,
    lr: Any,
    momentum: float,
    weight_decay: float,
    fp32_matmul_prec: str,
    split: str,
    tp_mode: str,
    ns_method: str,
    norm_eps: float,
    scale_mode: str,
    extra_scale_factor: float,
) -> None:
    """Raise unless every argument is in its range.

    Args:
        lr: learning rate.
        momentum: decay rate of the momentum.
        weight_decay: weight decay coefficient.
        fp32_matmul_prec: precision of the iteration.
        split: which fused weights are taken apart.
        tp_mode: how matrices that are cut over ranks are orthogonalized.
        ns_method: how the iteration is computed.
        norm_eps: least norm that an update is divided by.
        scale_mode: how the update grows with its matrix.
        extra_scale_factor: factor on every update.

    Raises:
        ConfigurationError: one is not (a `ValueError`).
    """
    require_argument(float(lr) >= 0, "lr", lr, "at least 0")
    require_argument(0 <= momentum < 1, "momentum", momentum, "at least 0 and less than 1")
    require_argument(weight_decay >= 0, "weight_decay", weight_decay, "at least 0")
    for name, value, allowed in (
        ("fp32_matmul_prec", fp32_matmul_prec, MATMUL_PRECISIONS),
        ("split", split, SPLITS),
        ("tp_mode", tp_mode, TP_MODES),
        ("ns_method", ns_method, NS_METHODS),
    ):
        require_argument(value in allowed, name, value, f"one of {allowed}")
    require_argument(norm_eps > 0, "norm_eps", norm_eps, "greater than 0")
    require_argument(
        0 < extra_scale_factor < math.inf, "extra_scale_factor", extra_scale_factor, "a number above 0"
    )
    validate_scale_mode(scale_mode)
