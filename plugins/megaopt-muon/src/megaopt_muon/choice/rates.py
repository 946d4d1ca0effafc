"""How fast this processor does what Newton-Schulz consists of: measured, read from a calibration, or assumed.

Counting operations does not tell time: a processor with matrix units multiplies large matrices at ten times the rate of
small ones, and spends on passes over memory what others spend on products.
"""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any, Final

import torch
from attrs import asdict, evolve, field, frozen
from attrs.validators import optional

from megaopt_core.errors import ConfigurationError
from megaopt_muon.choice.onednn_share import onednn_share
from megaopt_muon.products.narrow import commuting, outer
from megaopt_muon.products.precision import processor_capabilities

__all__ = ["DEFAULT", "Rates", "probe", "processor_kind"]

_SIZES: Final = (256, 768)
"""Rows of the matrices that a calibration measures with."""

_ASPECT: Final = 4
"""How many times longer than high these are."""

_ROUNDS: Final = 9
"""How often each operation is measured for one result of a calibration."""

_PROBED: Final = 384
"""Rows of the square matrices that a probe measures with: the rates of smaller ones tell little of larger ones."""

_RUNS: Final = 5
"""Results of a calibration, of which the median counts."""

_CALL: Final = 5e-6
"""Seconds that a call takes before it computes."""

_CALLS: Final = 10
"""Calls for the diagonals of a product of square matrices, which lie far apart in memory."""


_ENOUGH: Final = 3.0
"""Seconds after which nothing is measured again: a processor that cannot multiply bfloat16 takes seconds for a product,
of which one says as much as many."""


def _positive(_: Any, attribute: Any, value: Any) -> None:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0.0 < value <= sys.float_info.max:
        raise ConfigurationError.of(attribute.name, value, "must be a number above 0")


@frozen
class Rates:
    """Seconds for a unit of each operation, at matrices of `size` rows.

    Args:
        size: rows.
        gram: of `x x^T` per multiplication of the whole product, `x` four times as long as high.
        square: of a symmetric product of square matrices, likewise.
        apply: of a square matrix times `x` per multiplication.
        pass_: of an operation on every element, per element.
        onednn: part of the time of torch's own products in float32 that oneDNN's take; None: it was not measured.
    """

    size: int = field(validator=_positive)
    gram: float = field(validator=_positive)
    square: float = field(validator=_positive)
    apply: float = field(validator=_positive)
    pass_: float = field(validator=_positive)
    onednn: float | None = field(default=None, validator=optional(_positive))

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
        seconds = len(lengths) * small * small * large * (self.gram + self.apply)
        squares = sum(4 * length - 3 for length in lengths)
        seconds += squares * small**3 * self.square
        more = squares - sum(lengths)  # than single steps
        if more:  # and each run but the first asks for the norm of what it begins at
            seconds += more * _CALLS * _CALL + (len(lengths) - 1) * small * large * self.pass_
        return seconds


DEFAULT: Final = Rates(size=768, gram=2.0e-12, square=2.2e-12, apply=2.2e-12, pass_=1.5e-10, onednn=1.0)
"""What is assumed where nothing may be measured: one core with matrix units for bfloat16."""


def processor_kind() -> str:
    """Return what a processor multiplies bfloat16 with: `amx_bf16`, `avx512_bf16`, `neither`, or its architecture.

    Example:
        >>> processor_kind() in {"amx_bf16", "avx512_bf16", "neither", "aarch64"}
        True
    """
    capabilities = processor_capabilities()
    if capabilities.get("architecture", "x86_64") != "x86_64":
        return str(capabilities["architecture"])
    found = (name for name in ("amx_bf16", "avx512_bf16") if capabilities.get(name))
    return next(found, "neither")


def probe() -> Rates:
    """Measure in some milliseconds, kernels compiled: of square matrices, whose products need few kernels."""
    return _measured(_PROBED, 1, rounds=3)


def _measured(size: int, aspect: int, *, rounds: int) -> Rates:
    """Measure with matrices of one size.

    The operations take turns, and the fastest round of each counts: what else the machine does hits all of them alike.
    Where a round takes seconds, the first one counts, with what it compiled.
    """
    begin = time.perf_counter()
    # Whatever device and dtype a program makes its own default.
    x = torch.ones(size, aspect * size, dtype=torch.bfloat16, device="cpu")
    square, out = x.new_ones(2, size, size)
    large_out, large = torch.empty_like(x), aspect * size**3
    operations: dict[str, tuple[Callable[[], Any], int]] = {
        "gram": (lambda: outer(x, 1.0, out, tall=False), large),
        "square": (lambda: commuting(square, square, 1.0, out), size**3),
        "apply": (lambda: torch.mm(square, x, out=large_out), large),
        "pass_": (lambda: torch.add(x, x, alpha=0.5, out=large_out), x.numel()),
    }
    fastest = dict.fromkeys(operations, math.inf)
    for number in range(rounds + 1):
        if number and time.perf_counter() - begin > _ENOUGH:
            break
        if number == 1:  # the first one has compiled
            fastest = dict.fromkeys(operations, math.inf)
        for name, (run, units) in operations.items():
            start = time.perf_counter()
            run()
            elapsed = max(time.perf_counter() - start, 1e-9)
            fastest[name] = min(fastest[name], elapsed / units)
    return Rates(size=size, **fastest)


def calibrated() -> tuple[Rates, ...]:
    """Measure carefully, with matrices of two sizes: what `megaopt calibrate` stores."""
    found = []
    for size in _SIZES:
        begin, runs = time.perf_counter(), [_measured_with_share(size)]
        while len(runs) < _RUNS and time.perf_counter() - begin < _ENOUGH:
            runs.append(_measured_with_share(size))
        found.append(Rates(**{key: statistics.median_low(run[key] for run in runs) for key in runs[0]}))
    return tuple(found)


def _measured_with_share(size: int) -> dict[str, Any]:
    share = onednn_share(size, _ASPECT, least=_ROUNDS, most=_ROUNDS)
    return asdict(evolve(_measured(size, _ASPECT, rounds=_ROUNDS), onednn=share))
