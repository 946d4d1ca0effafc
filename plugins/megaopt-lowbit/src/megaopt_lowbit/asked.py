"""The dtypes that a configuration asks for, and whether the optimizers in use can keep them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from megaopt_core.config import STATE_DTYPES, dtype_name, parse_dtype
from megaopt_core.errors import UnsupportedSettingError
from megaopt_core.precision import LOW_PRECISION

if TYPE_CHECKING:
    from megaopt_core import OptimizerConfig, OptimizerEntry

__all__ = ["require_possible", "require_state", "state_dtypes"]

_CORE_SETTINGS: Mapping[str, tuple[str, ...]] = {
    "exp_avg_dtype": ("exp_avg",),
    "exp_avg_sq_dtype": ("exp_avg_sq",),
}
_WITHOUT_SCALE = (torch.float32, *LOW_PRECISION)


def require_possible(config: OptimizerConfig, entries: Mapping[str, OptimizerEntry]) -> None:
    """Raise unless every dtype of a configuration does something with the optimizers in use.

    Args:
        config: the run's configuration.
        entries: registered name to entry, of every optimizer in use.

    Raises:
        UnsupportedSettingError: a setting asks for what cannot be done, or would be ignored.
    """
    for name in ("main_grads_dtype", "main_params_dtype"):
        if getattr(config, name) not in _WITHOUT_SCALE:
            raise _unsupported(config, name, f"must be one of {_names(_WITHOUT_SCALE)}")
        if not (config.fp16 or config.bf16) and getattr(config, name) != torch.float32:
            raise _unsupported(config, name, "must be 'float32' unless fp16=True or bf16=True")
    if config.fp16 and config.main_grads_dtype == torch.float16:
        raise _unsupported(
            config, "main_grads_dtype", "unscaled gradients underflow in fp16; use 'float32' or 'bfloat16'"
        )
    held = {entry.state_dtype_settings[key] for entry in entries.values() for key in entry.state_dtypes}
    for name, keys in _settings_of(entries).items():
        if _asked(config, name) == torch.float32 or name in held:
            continue
        used = ", ".join(map(repr, sorted(entries)))
        what = " or ".join(keys)
        raise _unsupported(config, name, f"no optimizer in use can keep {what} in less than fp32 ({used})")


def require_state(config: OptimizerConfig, inner: torch.optim.Optimizer, entry: OptimizerEntry) -> None:
    """Raise unless an optimizer has every state that is to be kept in less than fp32.

    Args:
        config: the run's configuration.
        inner: the optimizer, its state made; one that has none yet passes.
        entry: says which settings govern which states.

    Raises:
        UnsupportedSettingError: a state dtype would be ignored.
    """
    keys = {key for state in inner.state.values() for key in state}
    for name, governed in _settings_of({"": entry}).items():
        if keys and _asked(config, name) != torch.float32 and not keys & set(governed):
            what = " or ".join(governed)
            held = ", ".join(sorted(keys))
            raise _unsupported(config, name, f"{type(inner).__name__} has no state {what} ({held})")


def state_dtypes(config: OptimizerConfig, entry: OptimizerEntry, name: str) -> dict[str, torch.dtype]:
    """Return state key to the dtype that it is kept in, where that is less than fp32.

    Args:
        config: the run's configuration.
        entry: the optimizer's entry, which says in which dtypes its states can be kept.
        name: the optimizer's registered name, for errors.

    Raises:
        UnsupportedSettingError: a state dtype is asked for that the optimizer cannot hold.
    """
    found = {}
    for key, held in entry.state_dtypes.items():
        setting = entry.state_dtype_settings[key]
        dtype = _asked(config, setting)
        if dtype == torch.float32:
            continue
        if dtype not in held:
            allowed = _names(sorted(held, key=str))
            raise _unsupported(config, setting, f"{name!r} can keep {key} in {allowed}")
        found[key] = dtype
    return found


def _settings_of(entries: Mapping[str, OptimizerEntry]) -> dict[str, tuple[str, ...]]:
    """Return setting to the state keys that it governs: the core's settings, and those of optimizers in use."""
    found = dict(_CORE_SETTINGS)
    for entry in entries.values():
        for key in entry.state_dtypes:
            name = entry.state_dtype_settings[key]
            found[name] = tuple(dict.fromkeys((*found.get(name, ()), key)))
    return found


def _asked(config: OptimizerConfig, name: str) -> torch.dtype:
    """Return the dtype that a setting asks for; a plugin's may be written as a string, and None is fp32."""
    value = parse_dtype(getattr(config, name))
    if value is None:
        return torch.float32
    if not isinstance(value, torch.dtype):
        raise _unsupported(config, name, f"must be a dtype, one of {_names(STATE_DTYPES)}")
    return value


def _names(dtypes: tuple[torch.dtype, ...] | list[torch.dtype]) -> str:
    return ", ".join(repr(dtype_name(dtype)) for dtype in dtypes)


def _unsupported(config: OptimizerConfig, setting: str, why: str) -> UnsupportedSettingError:
    value = getattr(config, setting)
    shown = repr(dtype_name(value)) if isinstance(value, torch.dtype) else repr(value)
    return UnsupportedSettingError.of(setting, value, why, shown=shown)
