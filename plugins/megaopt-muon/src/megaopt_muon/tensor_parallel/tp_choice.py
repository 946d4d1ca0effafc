"""Which way of orthogonalizing a matrix that lies on several ranks takes less time: a model of shapes alone.

All ranks of a matrix must choose alike, or they wait for each other forever. So nothing that differs between ranks is
asked, neither what a processor can do nor how fast it is: rates and links are assumed, of one kind of machine for each
kind of device. What counts is their order of magnitude.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Final

from attrs import frozen

__all__ = ["choose_tp_mode"]

_STEPS: Final = 5


@frozen
class _Machine:
    """Assumed rates.

    Args:
        multiplication: seconds for a multiplication and an addition, in the precision that most train with.
        byte: seconds for a byte from rank to rank.
        call: seconds for a collective of no bytes.
    """

    multiplication: float
    byte: float
    call: float


_PROCESSOR: Final = _Machine(multiplication=4e-12, byte=1e-9, call=2e-4)
_ACCELERATOR: Final = _Machine(multiplication=4e-15, byte=5e-12, call=2e-5)
_MACHINES: Final[Mapping[str, _Machine]] = MappingProxyType({"cpu": _PROCESSOR})


def choose_tp_mode(
    shapes: Sequence[tuple[int, ...]], dim: int, ranks: int, itemsize: int, device: str
) -> str:
    r"""Return `"duplicated"` or `"distributed"`, whichever the model takes for the faster.

    For a matrix of `n x k`, of which `k` is cut over `R` ranks, `duplicated` sends its elements once and iterates on
    the whole matrix, which costs :math:`T (2 m^2 M + m^3)` multiplications with `m` the smaller and `M` the larger
    dimension; `distributed` sums a Gram matrix of `n x n` in float32 in each of `T` steps, and multiplies
    :math:`T (2 n^2 k / R + n^3)`.

    Args:
        shapes: `[*batch, rows, columns]` of the whole matrices of one weight.
        dim: 0 when their rows are cut, 1 when columns are.
        ranks: how many ranks hold parts.
        itemsize: bytes of an element that is gathered.
        device: type of the device.

    Example:
        >>> choose_tp_mode([(512, 16384)], 1, 8, 4, "cuda"), choose_tp_mode([(16384, 512)], 1, 8, 4, "cuda")
        ('distributed', 'duplicated')
    """
    machine = _MACHINES.get(device, _ACCELERATOR)
    share = (ranks - 1) / ranks
    duplicated = distributed = 0.0
    for *batch, rows, columns in shapes:
        matrices = math.prod(batch)
        small, large = sorted((rows, columns))
        kept, cut = (columns, rows) if dim == 0 else (rows, columns)
        gathered = matrices * share * rows * columns * itemsize
        products: float = 2 * small**2 * large + small**3
        duplicated += machine.call + gathered * machine.byte
        duplicated += _STEPS * matrices * products * machine.multiplication
        summed = matrices * 2 * share * kept**2 * 4  # an all-reduce sends everything twice
        products = 2 * kept**2 * cut / ranks + kept**3
        distributed += machine.call
        distributed += _STEPS * (machine.call + summed * machine.byte)
        distributed += _STEPS * matrices * products * machine.multiplication
    return "distributed" if distributed < duplicated else "duplicated"
