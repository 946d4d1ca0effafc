"""Which precision policy a configuration asks for, and whether what it asks for can be done."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from megaopt_core.errors import UnsupportedSettingError
from megaopt_core.field_kinds import dtype_name
from megaopt_core.optimizers.full_precision import Fp32
from megaopt_core.optimizers.main_params import MainParams
from megaopt_core.optimizers.precision import LOW_PRECISION, PrecisionPolicy
from megaopt_core.optimizers.precision_aware import BATCH_ELEMENTS, ParamRemainders
from megaopt_core.params.specs import Granularity

if TYPE_CHECKING:
    from megaopt_core.config import OptimizerConfig
    from megaopt_core.entries import OptimizerEntry

__all__ = ["STORABLE", "precision_policy", "require_possible", "require_state"]

STORABLE = frozenset({torch.float32, *LOW_PRECISION, torch.float8_e4m3fn, torch.float8_e5m2})
"""Dtypes that a moment can be stored in, with a scale where the range asks for one."""

_STATE_FIELDS = {"exp_avg": "exp_avg_dtype", "exp_avg_sq": "exp_avg_sq_dtype"}
_WITHOUT_SCALE = (torch.float32, *LOW_PRECISION)


def require_possible(config: OptimizerConfig, entries: Mapping[str, OptimizerEntry]) -> None:
    """Raise unless every precision setting does something with the optimizers in use.

    Args:
        config: the run's configuration.
        entries: registered name to entry, of every optimizer in use.

    Raises:
        UnsupportedSettingError: a setting asks for what cannot be done, or would be ignored.
    """
    mixed = config.fp16 or config.bf16
    if config.loss_scale is not None and not mixed:
        raise _unsupported(config, "loss_scale", "needs fp16=True or bf16=True; fp32 losses are not scaled")
    if not config.use_precision_aware_optimizer:
        return
    for name in ("main_grads_dtype", "main_params_dtype"):
        if getattr(config, name) not in _WITHOUT_SCALE:
            raise _unsupported(config, name, f"must be one of {_names(_WITHOUT_SCALE)}")
        if not mixed and getattr(config, name) != torch.float32:
            raise _unsupported(config, name, "must be 'float32' unless fp16=True or bf16=True")
    if config.fp16 and config.main_grads_dtype == torch.float16:
        raise _unsupported(
            config, "main_grads_dtype", "unscaled gradients underflow in fp16; use 'float32' or 'bfloat16'"
        )
    for key, name in _STATE_FIELDS.items():
        if getattr(config, name) == torch.float32:
            continue
        if not any(key in entry.state_dtypes for entry in entries.values()):
            used = ", ".join(map(repr, sorted(entries)))
            raise _unsupported(config, name, f"no optimizer in use can keep {key} in less than fp32 ({used})")


def require_state(config: OptimizerConfig, inner: torch.optim.Optimizer) -> None:
    """Raise unless an optimizer has every state that is to be kept in less than fp32.

    Args:
        config: the run's configuration.
        inner: the optimizer, its state made; one that has none yet passes.

    Raises:
        UnsupportedSettingError: a state dtype would be ignored.
    """
    keys = {key for state in inner.state.values() for key in state}
    for key, name in _STATE_FIELDS.items():
        if keys and getattr(config, name) != torch.float32 and key not in keys:
            raise _unsupported(
                config, name, f"{type(inner).__name__} has no state {key} ({', '.join(sorted(keys))})"
            )


def precision_policy(config: OptimizerConfig, entry: OptimizerEntry, name: str) -> PrecisionPolicy:
    """Return a new policy for one inner optimizer.

    Args:
        config: the run's configuration.
        entry: the optimizer's entry, which says in which dtypes its states can be kept.
        name: the optimizer's registered name, for errors.

    Raises:
        UnsupportedSettingError: a state dtype is asked for that the optimizer cannot hold.
    """
    mixed = config.fp16 or config.bf16
    if not config.use_precision_aware_optimizer:
        return MainParams() if mixed else Fp32()
    state_dtypes = {}
    for key, setting in _STATE_FIELDS.items():
        dtype = getattr(config, setting)
        if dtype == torch.float32 or key not in entry.state_dtypes:
            continue
        if dtype not in entry.state_dtypes[key]:
            allowed = _names(sorted(entry.state_dtypes[key], key=str))
            raise _unsupported(config, setting, f"{name!r} can keep {key} in {allowed}")
        state_dtypes[key] = dtype
    return ParamRemainders(
        state_dtypes=state_dtypes,
        main_params_dtype=config.main_params_dtype,
        main_grads_dtype=config.main_grads_dtype,
        store_param_remainders=config.store_param_remainders,
        is_mixed=mixed,
        batch_elements=None if entry.granularity is Granularity.GROUP else BATCH_ELEMENTS,
    )


def _names(dtypes: tuple[torch.dtype, ...] | list[torch.dtype]) -> str:
    return ", ".join(repr(dtype_name(dtype)) for dtype in dtypes)


def _unsupported(config: OptimizerConfig, setting: str, why: str) -> UnsupportedSettingError:
    value = getattr(config, setting)
    shown = repr(dtype_name(value)) if isinstance(value, torch.dtype) else repr(value)
    return UnsupportedSettingError(f"{setting}={shown}: {why}", setting=setting, value=value)
