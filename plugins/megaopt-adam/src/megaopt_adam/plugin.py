"""The plugin: Adam, AdamW and SGD on torch's own implementations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from megaopt_adam.cautious import Adam, AdamW
from megaopt_adam.implementation import fastest_implementation, has_sparse_gradients
from megaopt_adam.mup import adam_mup, sgd_mup
from megaopt_adam.settings import AdamSettings, SGDSettings
from megaopt_adam.state import init_adam_state, init_sgd_state
from megaopt_core import OptimizerEntry, hookimpl

if TYPE_CHECKING:
    from megaopt_core import OptimizerConfig, ProcessGroupCollection
    from megaopt_core.plugin_api import ConfigToKwargs

__all__ = ["megaopt_api", "megaopt_optimizer_entries"]

megaopt_api = "1"

_MOMENTUM = frozenset({torch.float32, torch.bfloat16, torch.float16, torch.uint8})
_LOW = _MOMENTUM | {torch.float8_e4m3fn, torch.float8_e5m2}


def adam_kwargs(
    config: OptimizerConfig,
    model_chunks: Sequence[torch.nn.Module],
    pg_collection: ProcessGroupCollection | None,
) -> dict[str, Any]:
    """Return the constructor arguments of `Adam`.

    Args:
        config: the run's configuration.
        model_chunks: the model, whose device and dtypes decide between fused and foreach.
        pg_collection: not used.
    """
    return {
        "lr": config.lr,
        "betas": (config.adam_beta1, config.adam_beta2),
        "eps": config.adam_eps,
        "weight_decay": config.weight_decay,
        "decoupled_weight_decay": config.decoupled_weight_decay,
        "cautious_weight_decay": config.cautious_weight_decay,
        **fastest_implementation(model_chunks),
    }


def adamw_kwargs(
    config: OptimizerConfig,
    model_chunks: Sequence[torch.nn.Module],
    pg_collection: ProcessGroupCollection | None,
) -> dict[str, Any]:
    """Return the constructor arguments of `AdamW`, which always decouples weight decay.

    Args:
        config: the run's configuration.
        model_chunks: the model.
        pg_collection: not used.
    """
    kwargs = adam_kwargs(config, model_chunks, pg_collection)
    del kwargs["decoupled_weight_decay"]
    return kwargs


def sgd_kwargs(
    config: OptimizerConfig,
    model_chunks: Sequence[torch.nn.Module],
    pg_collection: ProcessGroupCollection | None,
) -> dict[str, Any]:
    """Return the constructor arguments of `torch.optim.SGD`.

    Args:
        config: the run's configuration.
        model_chunks: the model, whose device and dtypes decide between fused and foreach.
        pg_collection: not used.
    """
    return {
        "lr": config.lr,
        "momentum": config.sgd_momentum,
        "weight_decay": config.weight_decay,
        # torch's fused SGD refuses sparse gradients, the others take them.
        **({} if has_sparse_gradients(model_chunks) else fastest_implementation(model_chunks)),
    }


def _adam_entry(
    optimizer_cls: type[torch.optim.Optimizer],
    kwargs: ConfigToKwargs,
    settings: type | None,
    name: str,
    about: str,
) -> OptimizerEntry:
    return OptimizerEntry(
        optimizer_cls=optimizer_cls,
        init_state_fn=init_adam_state,
        config_to_kwargs=kwargs,
        settings=settings,
        setting_prefixes=("adam",),
        state_dtypes={"exp_avg": _LOW, "exp_avg_sq": _LOW},
        honours_noop=True,
        supports_fp16=True,
        mup=adam_mup,
        same_as="torch.optim:AdamW",
        description=about,
        example=f'build_optimizer(model, "{name}", lr=1e-3, weight_decay=0.1, adam_beta2=0.95)',
    )


@hookimpl
def megaopt_optimizer_entries() -> Mapping[str, OptimizerEntry]:
    """Return adam, adamw and sgd."""
    return {
        "adam": _adam_entry(
            Adam,
            adam_kwargs,
            AdamSettings,
            "adam",
            "Adam; with decoupled_weight_decay, the default, the same as AdamW",
        ),
        "adamw": _adam_entry(
            AdamW,
            adamw_kwargs,
            None,
            "adamw",
            "AdamW: weight decay is decoupled; decoupled_weight_decay does not change that",
        ),
        "sgd": OptimizerEntry(
            optimizer_cls=torch.optim.SGD,
            init_state_fn=init_sgd_state,
            config_to_kwargs=sgd_kwargs,
            settings=SGDSettings,
            setting_prefixes=("sgd",),
            state_dtypes={"momentum_buffer": _MOMENTUM},
            state_dtype_settings={"momentum_buffer": "sgd_momentum_dtype"},
            honours_noop=True,
            supports_fp16=True,
            mup=sgd_mup,
            description="SGD with momentum",
            example='build_optimizer(model, "sgd", lr=0.1, sgd_momentum=0.9)',
        ),
    }
