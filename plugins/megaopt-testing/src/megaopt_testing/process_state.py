"""Settings of the whole process that a plugin may change: what they are, and putting them back."""

from __future__ import annotations

import gc
import os
import random
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

__all__ = ["kept", "process_settings", "random_states", "seed_all"]

type _Setting = tuple[Callable[[], Any], Callable[[Any], Any]]


def _attribute(owner: Any, name: str) -> _Setting:
    return (lambda: getattr(owner, name), lambda value: setattr(owner, name, value))


def _flushes() -> bool:
    """Return whether numbers below the normal ones are taken for zero."""
    return float(torch.tensor(1e-30) * torch.tensor(1e-12)) == 0.0


def _print_options() -> dict[str, Any]:
    return dict(vars(torch._tensor_str.PRINT_OPTS))  # no function of torch returns them


def _put_environment(before: Mapping[str, str]) -> None:
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)


def _put_filters(before: list[Any]) -> None:
    warnings.filters[:] = before  # type: ignore[index] # a list, which typeshed shows as a sequence
    warnings._filters_mutated()  # type: ignore[attr-defined] # what has been decided about a line is forgotten


_CUDNN, _MATMUL = torch.backends.cudnn, torch.backends.cuda.matmul

_SETTINGS: Mapping[str, _Setting] = {
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
    "torch.set_flush_denormal": (_flushes, torch.set_flush_denormal),
    "torch.set_printoptions": (_print_options, lambda options: torch.set_printoptions(**options)),
    **{
        f"torch.backends.cudnn.{name}": _attribute(_CUDNN, name)
        for name in ("enabled", "benchmark", "deterministic", "allow_tf32")
    },
    **{
        f"torch.backends.cuda.matmul.{name}": _attribute(_MATMUL, name)
        for name in (
            "allow_fp16_reduced_precision_reduction",
            "allow_bf16_reduced_precision_reduction",
        )
    },
    **{
        f"torch.backends.cuda.enable_{name}_sdp": (
            getattr(torch.backends.cuda, f"{name}_sdp_enabled"),
            getattr(torch.backends.cuda, f"enable_{name}_sdp"),
        )
        for name in ("flash", "mem_efficient", "math", "cudnn")
    },
    "gc.enable": (gc.isenabled, lambda on: gc.enable() if on else gc.disable()),
    "os.environ": (lambda: dict(os.environ), _put_environment),
    "warnings.filterwarnings": (lambda: list(warnings.filters), _put_filters),
}


def process_settings() -> dict[str, Any]:
    """Return the value of each by the name of what sets it."""
    return {name: ask() for name, (ask, _) in _SETTINGS.items()}


def seed_all(seed: int) -> None:
    """Seed torch's random generator, Python's, and numpy's where somebody has imported it.

    Args:
        seed: the seed.
    """
    torch.manual_seed(seed)
    random.seed(seed)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(seed)


def random_states() -> dict[str, Any]:
    """Return the state of every random generator of the process by the name of what it belongs to, to be compared."""
    states = {"torch": torch.get_rng_state().tolist(), "random": random.getstate()}
    if (numpy := sys.modules.get("numpy")) is not None:
        kind, keys, *rest = numpy.random.get_state()
        states["numpy"] = (kind, keys.tolist(), *rest)
    return states


@contextmanager
def kept() -> Iterator[None]:
    """Put all of them, and all random generators, back afterwards.

    Example:
        >>> with kept():
        ...     torch.set_default_dtype(torch.float64)
        >>> torch.get_default_dtype()
        torch.float32
    """
    before, chance = process_settings(), random.getstate()
    numpy = sys.modules.get("numpy")
    drawn = None if numpy is None else numpy.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        for name, (ask, put) in _SETTINGS.items():
            if ask() != before[name]:
                put(before[name])
        random.setstate(chance)
        if numpy is not None:
            numpy.random.set_state(drawn)
