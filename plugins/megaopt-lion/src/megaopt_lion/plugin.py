"""Entry point of megaopt-lion: what it offers to megaopt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from megaopt_core import OptimizerEntry, hookimpl
from megaopt_core.params import ParamSpec
from megaopt_lion.settings import WORTH_A_KERNEL, WORTH_COMPILING, LionSettings

if TYPE_CHECKING:
    from megaopt_core import OptimizerConfig, ProcessGroupCollection

__all__ = ["megaopt_api", "megaopt_optimizer_entries"]

megaopt_api = "1"


def _lion_kwargs(
    config: OptimizerConfig,
    model_chunks: Sequence[torch.nn.Module],
    pg_collection: ProcessGroupCollection | None,
) -> Mapping[str, Any]:
    """Return the constructor arguments of `Lion`: always its own betas."""
    del model_chunks, pg_collection
    return {
        "lr": config.lr,
        "betas": (config.lion_beta1, config.lion_beta2),
        "weight_decay": config.weight_decay,
        "weight_decay_method": "decoupled" if config.decoupled_weight_decay else "l2",
        "cautious_weight_decay": config.cautious_weight_decay,
        "compile": config.lion_compile,
    }


def _init_state(optimizer: torch.optim.Optimizer, config: OptimizerConfig | None = None) -> None:
    from megaopt_lion.lion import init_state

    init_state(optimizer, config)


def _unused(config: OptimizerConfig, specs: Sequence[ParamSpec]) -> Mapping[str, str]:
    """Return the settings that were given and change nothing."""
    compile_ = config.lion_compile
    if compile_ is False and sum(spec.numel for spec in specs) < WORTH_COMPILING:
        return {"lion_compile": "so few elements are not compiled anyway"}
    tiny = all(spec.numel < WORTH_A_KERNEL for spec in specs)
    if compile_ and tiny and not torch.accelerator.is_available():
        return {
            "lion_compile": f"on CPUs tensors of fewer than {WORTH_A_KERNEL} elements are stepped without"
        }
    return {}


@hookimpl
def megaopt_optimizer_entries() -> Mapping[str, OptimizerEntry]:
    """Offer `lion`."""
    return {
        "lion": OptimizerEntry(
            "megaopt_lion.lion:Lion",
            init_state_fn=_init_state,
            config_to_kwargs=_lion_kwargs,
            settings=LionSettings,
            setting_prefixes=("lion",),
            state_dtypes={"exp_avg": frozenset({torch.float32, torch.bfloat16, torch.float16, torch.uint8})},
            supports_fp16=True,
            unused_settings=_unused,
            description="Lion: the sign of momentum; half of Adam's state",
            example='build_optimizer(model, "lion", lr=1e-4, weight_decay=1.0, lion_beta2=0.99)',
        )
    }
