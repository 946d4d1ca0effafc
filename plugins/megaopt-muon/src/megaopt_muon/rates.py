"""How fast this processor does what Newton-Schulz consists of: measured, read from a calibration, or assumed.

Counting operations does not tell time: a processor with matrix units multiplies large matrices at ten times the rate of
small ones, and spends on passes over memory what others spend on products.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from attrs import asdict, field, frozen

from megaopt_core.errors import ConfigurationError

__all__ = ["DEFAULT", "Rates", "probe", "processor_kind"]

_SIZES: Final = (256, 768)
"""Rows of the matrices that a calibration measures with; a probe takes the first."""

_ASPECT: Final = 4


def _positive(_: Any, attribute: Any, value: Any) -> None:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0.0 < value < float("inf"):
        raise ConfigurationError(
            f"{attribute.name}={value!r}: must be a number above 0", setting=attribute.name, value=value
        )


@frozen
class Rates:
    """Seconds for a unit of each operation, at matrices of `size` rows.

    Args:
        size: rows.
        gram: of `x x^T` per multiplication, `x` four times as long as high.
        square: of a product of square matrices with an addend per multiplication.
        apply: of a square matrix times `x`, with an addend, per multiplication.
        pass_: of an operation on every element, per element.
    """

    size: int = field(validator=_positive)
    gram: float = field(validator=_positive)
    square: float = field(validator=_positive)
    apply: float = field(validator=_positive)
    pass_: float = field(validator=_positive)

    def run_time(self, lengths: tuple[int, ...], small: int, large: int) -> float:
        """Return the seconds that an iteration in runs of these lengths takes.

        Args:
            lengths: steps of each run; a run of one is a plain step.
            small: the smaller dimension of the matrix.
            large: the larger one.

        Example:
            >>> DEFAULT.run_time((3, 2), 512, 4096) < DEFAULT.run_time((1,) * 5, 512, 4096)
            True
        """
        squares, passes = 0, 0.0
        for length in lengths:
            squares += 4 * length - 3
            # A run adds matrices before it multiplies, and asks for the norm.
            passes += (2 * length - 2) * small * small + (0 if length == 1 else small * large)
        large_product = small * small * large
        return (
            len(lengths) * large_product * (self.gram + self.apply)
            + squares * small**3 * self.square
            + passes * self.pass_
        )


DEFAULT: Final = Rates(size=768, gram=2.0e-12, square=2.2e-12, apply=2.2e-12, pass_=1.5e-10)
"""What is assumed where nothing may be measured: one core with matrix units for bfloat16."""


def processor_kind() -> str:
    """Return what a processor multiplies bfloat16 with: `amx_bf16`, `avx512_bf16`, `neither`, or its architecture.

    Example:
        >>> processor_kind() in {"amx_bf16", "avx512_bf16", "neither", "aarch64"}
        True
    """
    ask = getattr(torch.cpu, "get_capabilities", None)
    capabilities: Mapping[str, Any] = ask() if ask is not None else {}
    if capabilities.get("architecture", "x86_64") != "x86_64":
        return str(capabilities["architecture"])
    found = (name for name in ("amx_bf16", "avx512_bf16") if capabilities.get(name))
    return next(found, "neither")


def probe(size: int = _SIZES[0], *, rounds: int = 3) -> Rates:
    """Measure with matrices of one size; with the smallest in a few milliseconds, kernels compiled.

    Args:
        size: rows.
        rounds: how often each operation is timed; the fastest counts.
    """
    x = torch.ones(size, _ASPECT * size, dtype=torch.bfloat16)
    square, out = torch.ones(2, size, size, dtype=torch.bfloat16)
    large_out = torch.empty_like(x)

    def fastest(run: Callable[[], Any]) -> float:
        run()  # compiles
        times = []
        for _ in range(rounds):
            start = time.perf_counter()
            run()
            times.append(time.perf_counter() - start)
        return max(min(times), 1e-9)

    large = _ASPECT * size**3
    return Rates(
        size=size,
        gram=fastest(lambda: torch.mm(x, x.mT, out=out)) / large,
        square=fastest(lambda: torch.addmm(square, square, square, beta=1, alpha=0.5, out=out)) / size**3,
        apply=fastest(lambda: torch.addmm(x, square, x, beta=1, alpha=0.5, out=large_out)) / large,
        pass_=fastest(lambda: torch.add(x, x, alpha=0.5, out=large_out)) / x.numel(),
    )


def calibrated() -> tuple[Rates, ...]:
    """Measure carefully, with matrices of two sizes: what `megaopt calibrate` stores."""
    found = []
    for size in _SIZES:
        runs = [asdict(probe(size, rounds=9)) for _ in range(5)]
        found.append(Rates(**{key: statistics.median(run[key] for run in runs) for key in runs[0]}))
    return tuple(found)
