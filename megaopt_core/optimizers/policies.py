"""Which precision policy a configuration asks for."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from megaopt_core.errors import UnsupportedSettingError
from megaopt_core.optimizers.precision import Fp32, MainParams, PrecisionPolicy
from megaopt_core.optimizers.precision_aware import ParamRemainders

if TYPE_CHECKING:
    from megaopt_core.config import OptimizerConfig
    from megaopt_core.entries import OptimizerEntry

__all__ = ["precision_policy"]

_STATE_FIELDS = {"exp_avg": "exp_avg_dtype", "exp_avg_sq": "exp_avg_sq_dtype"}


def precision_policy(config: OptimizerConfig, entry: OptimizerEntry, name: str) -> PrecisionPolicy:
    """Return a new policy for one inner optimizer.

    Args:
        config: the run's configuration.
        entry: the optimizer's entry, which says in which dtypes its states can be kept.
        name: the optimizer's registered name, for errors.

    Raises:
        UnsupportedSettingError: a state dtype is asked for that the optimizer cannot hold.
    """
    if not (config.fp16 or config.bf16):
        return Fp32()
    if not config.use_precision_aware_optimizer:
        return MainParams()
    state_dtypes = {}
    for key, setting in _STATE_FIELDS.items():
        dtype = getattr(config, setting)
        if dtype == torch.float32 or key not in entry.state_dtypes:
            continue
        if dtype not in entry.state_dtypes[key]:
            allowed = ", ".join(sorted(str(choice).removeprefix("torch.") for choice in entry.state_dtypes[key]))
            raise UnsupportedSettingError(
                f"{setting}={dtype}: {name!r} can keep {key} in {allowed}", setting=setting, value=dtype
            )
        state_dtypes[key] = dtype
    return ParamRemainders(
        state_dtypes=state_dtypes,
        main_params_dtype=config.main_params_dtype,
        main_grads_dtype=config.main_grads_dtype,
        store_param_remainders=config.store_param_remainders,
    )
