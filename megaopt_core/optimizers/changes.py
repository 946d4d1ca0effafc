"""Which tensors a step really changed: the proof that the optimizer ran."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from attrs import define, field

__all__ = ["SAMPLE", "ChangeRecord"]

SAMPLE = 16
"""Values of each tensor that are compared in steps where not all are."""

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

type _Kind = tuple[torch.dtype, torch.device]
type _Values = dict[_Kind, torch.Tensor]


def _as_bits(tensor: torch.Tensor) -> torch.Tensor:
    real = torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()
    return real.contiguous().view(_BITS[real.element_size()])


def _bit_sum(tensors: Sequence[torch.Tensor]) -> tuple[int, ...]:
    """Return a sum over the bit patterns of each tensor: differs when a value does, up to coincidence."""
    return tuple(int(_as_bits(tensor).sum(dtype=torch.int64)) for tensor in tensors)


def _spread(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of at most `SAMPLE` values, spread over its memory, or along its longest dim if that has gaps."""
    by_stride = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    dense = tensor.detach().permute(by_stride)
    if dense.is_contiguous():
        line = dense.view(-1)
    else:
        longest = max(range(tensor.dim()), key=tensor.size)
        line = tensor.detach().movedim(longest, -1)[(0,) * (tensor.dim() - 1)]
    return line[:: max(line.numel() // SAMPLE, 1)][:SAMPLE]


@define
class _Sampler:
    """Reads the sampled values of many tensors with one kernel a dtype and device; views are made once."""

    _addresses: list[int] = field(factory=list)
    _views: dict[_Kind, list[torch.Tensor]] = field(factory=dict)
    _owners: dict[_Kind, list[int]] = field(factory=dict)

    def read(self, watched: Sequence[Sequence[torch.Tensor]]) -> _Values:
        addresses = [tensor.data_ptr() for tensors in watched for tensor in tensors]
        if addresses != self._addresses:
            self._prepare(watched, addresses)
        return {kind: torch.cat(views) for kind, views in self._views.items()}

    def _prepare(self, watched: Sequence[Sequence[torch.Tensor]], addresses: list[int]) -> None:
        self._addresses, self._views, self._owners = addresses, {}, {}
        for owner, tensors in enumerate(watched):
            for tensor in tensors:
                kind = (tensor.dtype, tensor.device)
                view = _spread(tensor)
                self._views.setdefault(kind, []).append(view)
                self._owners.setdefault(kind, []).extend([owner] * view.numel())

    def changed(self, before: _Values, after: _Values) -> set[int]:
        found: set[int] = set()
        for kind, owners in self._owners.items():
            differs = (before[kind] != after[kind]).tolist()
            found.update(owner for owner, differ in zip(owners, differs, strict=True) if differ)
        return found


@define
class ChangeRecord:
    """Records, for every piece, whether the last step changed it.

    The first step compares all values. Later steps compare :data:`SAMPLE` values of each tensor, which costs two small
    kernels and finds a dense update; a tensor of which few rows have a gradient may be missed. With `exact` every step
    compares all values, at the price of two passes over the parameters.

    Args:
        exact: compare all values in every step.
    """

    exact: bool = False
    method: str = field(default="no step yet", init=False)
    _first: bool = field(default=True, init=False)
    _sampler: _Sampler = field(factory=_Sampler, init=False)
    _changed: list[bool] = field(factory=list, init=False)
    _samples: tuple[_Values, _Values] | None = field(default=None, init=False)

    def before(self, watched: Sequence[Sequence[torch.Tensor]]) -> list[tuple[int, ...]] | _Values:
        """Return what :meth:`after` compares with.

        Args:
            watched: for each piece the tensors in which a change shows, before the step.
        """
        if self.exact or self._first:
            return [_bit_sum(tensors) for tensors in watched]
        return self._sampler.read(watched)

    def after(
        self, watched: Sequence[Sequence[torch.Tensor]], before: list[tuple[int, ...]] | _Values
    ) -> None:
        """Record what the step left behind.

        Args:
            watched: the same tensors, stepped.
            before: what :meth:`before` returned.
        """
        if isinstance(before, dict):
            self.method, self._samples = (
                f"{SAMPLE} values of each compared",
                (before, self._sampler.read(watched)),
            )
            self._changed = [False] * len(watched)
        else:
            self.method, self._samples = "all values compared", None
            self._changed = [old != _bit_sum(tensors) for old, tensors in zip(before, watched, strict=True)]
        self._first = False

    def skipped(self) -> None:
        """Record that a step was given up: it has changed nothing."""
        self._samples, self._changed = None, []
        self.method = "step skipped"

    @property
    def has_step(self) -> bool:
        """True once a step was recorded, made or skipped."""
        return not self._first or self.method == "step skipped"

    @property
    def changed(self) -> list[bool]:
        """For each piece, whether the last step changed it; empty before the first step."""
        if self._samples is None:
            return list(self._changed)
        found = self._sampler.changed(*self._samples)
        return [index in found for index in range(len(self._changed))]
