"""Settings of the whole process that a plugin may change: what they are, and putting them back."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

__all__ = ["kept", "process_settings"]

_SETTINGS: Mapping[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "torch.set_grad_enabled": (torch.is_grad_enabled, torch.set_grad_enabled),
    "torch.set_default_dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "torch.set_num_threads": (torch.get_num_threads, torch.set_num_threads),
    "torch.set_float32_matmul_precision": (
        torch.get_float32_matmul_precision,
        torch.set_float32_matmul_precision,
    ),
    "torch.use_deterministic_algorithms": (
        torch.are_deterministic_algorithms_enabled,
        torch.use_deterministic_algorithms,
    ),
    "torch.autograd.set_detect_anomaly": (torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly),
    "gc.enable": (gc.isenabled, lambda on: gc.enable() if on else gc.disable()),
}


def process_settings() -> dict[str, Any]:
    """Return the value of each by the name of what sets it."""
    return {name: ask() for name, (ask, _) in _SETTINGS.items()}


@contextmanager
def kept() -> Iterator[None]:
    """Put all of them, and both random generators, back afterwards.

    Example:
        >>> with kept():
        ...     torch.set_default_dtype(torch.float64)
        >>> torch.get_default_dtype()
        torch.float32
    """
    before, chance = process_settings(), random.getstate()
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        for name, (ask, put) in _SETTINGS.items():
            if ask() != before[name]:
                put(before[name])
        random.setstate(chance)
