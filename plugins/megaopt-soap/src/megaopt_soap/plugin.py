"""Entry point of megaopt-soap: what it offers to megaopt, without importing an algorithm."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from megaopt_core import OptimizerEntry, hookimpl
from megaopt_core.params import MATRIX, Granularity, MatrixView, ParamSpec
from megaopt_soap.settings import SoapSettings

if TYPE_CHECKING:
    from megaopt_core import OptimizerConfig, ProcessGroupCollection

__all__ = ["megaopt_api", "megaopt_optimizer_entries"]

megaopt_api = "1"

_STORABLE = frozenset({torch.float32, torch.bfloat16, torch.float16, torch.uint8})
"""Dtypes that the moments of a weight that is one matrix can be kept in; factors and bases stay in fp32."""


def _accepts(spec: ParamSpec, view: MatrixView | None) -> str | None:
    if view is None:
        return "not a hidden matrix"
    if spec.dtype.is_complex:
        return "complex matrices have no real eigenbases"
    if any(min(shape[-2:]) < 1 for shape in view.matrix_shapes(spec.shape)):
        return "a matrix without elements"
    return None


def _step_cost(spec: ParamSpec, view: MatrixView | None) -> float:
    """Return the operations of a step that refreshes the bases: products, and two QR decompositions a matrix."""
    cost = 0.0
    for *batch, rows, columns in (MATRIX if view is None else view).matrix_shapes(spec.shape):
        products = 2.0 * 4 * rows * columns * (rows + columns)
        cost += math.prod(batch) * (products + 14.0 / 3 * (rows**3 + columns**3))
    return cost


def _soap_kwargs(
    config: OptimizerConfig,
    model_chunks: Sequence[torch.nn.Module],
    pg_collection: ProcessGroupCollection | None,
) -> Mapping[str, Any]:
    """Return the constructor arguments of `SOAP`."""
    del model_chunks, pg_collection  # how a parameter splits into matrices comes with the parameter
    settings = config.settings(SoapSettings)
    return {
        "lr": config.lr,
        "betas": (config.adam_beta1, config.adam_beta2),
        "shampoo_beta": settings.shampoo_beta,
        "eps": config.adam_eps,
        "weight_decay": config.weight_decay,
        "cautious_weight_decay": config.cautious_weight_decay,
        "precondition_frequency": settings.precondition_frequency,
        "use_kl_shampoo": settings.use_kl_shampoo,
        "max_precond_dim": settings.max_precond_dim,
        "orthogonalize": settings.orthogonalize,
        "extra_scale_factor": settings.extra_scale_factor,
        "first_step": settings.first_step,
        "fp32_matmul_prec": settings.fp32_matmul_prec,
        "max_update_rms": settings.max_update_rms,
    }


def _init_state(optimizer: torch.optim.Optimizer, config: OptimizerConfig | None = None) -> None:
    from megaopt_soap.soap import init_state

    init_state(optimizer, config)


def _unused(config: OptimizerConfig, specs: Sequence[ParamSpec]) -> Mapping[str, str]:
    """Return the settings that were given and change nothing."""
    del specs  # they do not matter to any
    settings = config.settings(SoapSettings)
    is_set = settings.extra_scale_factor != SoapSettings().extra_scale_factor
    return (
        {"soap_extra_scale_factor": "soap_orthogonalize is False"}
        if is_set and not settings.orthogonalize
        else {}
    )


@hookimpl
def megaopt_optimizer_entries() -> Mapping[str, OptimizerEntry]:
    """Offer `soap`."""
    return {
        "soap": OptimizerEntry(
            "megaopt_soap.soap:SOAP",
            init_state_fn=_init_state,
            config_to_kwargs=_soap_kwargs,
            settings=SoapSettings,
            setting_prefixes=("soap",),
            granularity=Granularity.TENSOR,
            accepts=_accepts,
            fallback="adam",
            step_cost=_step_cost,
            state_dtypes=dict.fromkeys(("exp_avg", "exp_avg_sq"), _STORABLE),
            unused_settings=_unused,
            description="SOAP: Adam in the eigenbases of Shampoo's preconditioner",
            example='build_optimizer(model, "soap", lr=3e-3, soap_precondition_frequency=10)',
        )
    }
