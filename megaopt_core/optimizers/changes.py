"""Which tensors a step really changed: the proof that the optimizer ran."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from attrs import define, field

__all__ = ["ChangeRecord"]

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _bit_sums(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Return a sum over the bit patterns of each tensor: differs when a value does, up to coincidence."""
    sums = []
    for tensor in tensors:
        real = torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()
        bits = real.contiguous().view(_BITS[real.element_size()])
        sums.append(int(bits.sum(dtype=torch.int64)))
    return sums


@define
class ChangeRecord:
    """Records, for every stepped tensor, whether the last step changed it.

    By default the first step compares values and later steps look at torch's write counters, which cost nothing but
    count a write of equal values too. With `exact` every step compares values, at the price of two passes over the
    parameters.

    Args:
        exact: compare values in every step.
    """

    exact: bool = False
    changed: list[bool] = field(factory=list, init=False)
    method: str = field(default="no step yet", init=False)
    _first: bool = field(default=True, init=False)

    def before(self, tensors: Sequence[torch.Tensor]) -> list[int]:
        """Return what :meth:`after` compares with.

        Args:
            tensors: the tensors that are about to be stepped.
        """
        if self.exact or self._first:
            return _bit_sums(tensors)
        return [tensor._version for tensor in tensors]

    def after(self, tensors: Sequence[torch.Tensor], before: list[int]) -> None:
        """Record which tensors changed.

        Args:
            tensors: the same tensors, stepped.
            before: what :meth:`before` returned.
        """
        if self.exact or self._first:
            now, self.method = _bit_sums(tensors), "values compared"
        else:
            now, self.method = [tensor._version for tensor in tensors], "writes counted"
        self._first = False
        self.changed = [old != new for old, new in zip(before, now, strict=True)]
