"""Which tensors a step really changed: the proof that the optimizer ran."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from attrs import define, field

from megaopt_core.parallel._digest import digest_of_each

__all__ = [
    "SAMPLE",
    "Address",
    "ChangeRecord",
    "Samples",
    "Values",
    "addresses",
    "any_differ",
    "differing_owners",
    "spread",
]

SAMPLE = 16
"""Values of each tensor that are compared in steps where not all are."""

_SHORT = 16384

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

type _Kind = tuple[torch.dtype, torch.device, bool]
"""What one kernel reads together: dtype, device, and whether the values of each tensor lie side by side."""

type Values = dict[_Kind, torch.Tensor]
"""What was read of many tensors, a tensor of values for each kind."""


def _as_bits(tensor: torch.Tensor) -> torch.Tensor:
    real = torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()
    return real.contiguous().view(_BITS[real.element_size()])


def spread(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of at most `SAMPLE` values, spread over its memory, or along its longest dim if that has gaps.

    Short vectors, of which models have many, give their first values: what lies side by side is read faster, and a
    gradient reaches all of a bias or none.

    Args:
        tensor: any tensor of strided memory.
    """
    if tensor.dim() == 1 and tensor.numel() <= _SHORT:
        return tensor.detach()[:SAMPLE]
    line = _line(tensor)
    if line is None:
        longest = max(range(tensor.dim()), key=tensor.size)
        line = tensor.detach().movedim(longest, -1)[(0,) * (tensor.dim() - 1)]
    return line[:: max(line.numel() // SAMPLE, 1)][:SAMPLE]


def _line(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return a view of all values in the order of the memory; None where it has gaps."""
    by_stride = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    dense = tensor.detach().permute(by_stride)
    return dense.view(-1) if dense.is_contiguous() else None


@define
class _Digests:
    """Reads a digest of all bits of each tensor: the same for two values only by a chance of one in 2**60 or so."""

    owners: dict[_Kind, list[int]] = field(factory=dict)

    def read(self, watched: Sequence[Sequence[torch.Tensor]]) -> Values:
        together: dict[_Kind, list[torch.Tensor]] = {}
        self.owners = {}
        for owner, tensors in enumerate(watched):
            for tensor in tensors:
                kind = (torch.int64, tensor.device, True)
                together.setdefault(kind, []).append(tensor.detach())
                self.owners.setdefault(kind, []).append(owner)
        return {kind: digest_of_each(some) for kind, some in together.items()}

    def read_again(self, watched: Sequence[Sequence[torch.Tensor]]) -> Values:
        return self.read(watched)

    def moved(self, watched: Sequence[Sequence[torch.Tensor]]) -> set[int]:
        return set()


def addresses(tensors: Sequence[torch.Tensor]) -> list[Address]:
    """Return where the memory of tensors begins, and their strides.

    Args:
        tensors: any tensors of strided memory.
    """
    return list(zip(map(torch.Tensor.data_ptr, tensors), map(torch.Tensor.stride, tensors), strict=True))


type Address = tuple[int, tuple[int, ...]]
"""Where a tensor's memory begins, and its strides."""


@define
class Samples:
    """Reads some values of each tensor with one kernel a dtype and device; views are made once, for their addresses.

    Args:
        whole: of tensors with so many values or fewer all are read.

    Attributes:
        owners: whose each of the values is.
    """

    whole: int = 0
    owners: dict[_Kind, list[int]] = field(factory=dict, init=False)
    _addresses: list[Address] = field(factory=list)
    _views: dict[_Kind, list[torch.Tensor]] = field(factory=dict)

    def read(self, watched: Sequence[Sequence[torch.Tensor]]) -> Values:
        """Return some values of every tensor.

        Args:
            watched: the tensors of each owner.
        """
        places = addresses(list(chain.from_iterable(watched)))
        if places != self._addresses:
            self._addresses, self._views, self.owners = places, {}, {}
            for owner, tensors in enumerate(watched):
                for tensor in tensors:
                    view = _line(tensor) if tensor.numel() <= self.whole else None
                    view = spread(tensor) if view is None else view
                    kind = (tensor.dtype, tensor.device, view.is_contiguous())
                    self._views.setdefault(kind, []).append(view)
                    self.owners.setdefault(kind, []).extend([owner] * view.numel())
        return self.read_again(watched)

    def read_again(self, watched: Sequence[Sequence[torch.Tensor]]) -> Values:
        """Return the same values, as they are now.

        Args:
            watched: the same tensors.
        """
        return {kind: torch.cat(views) for kind, views in self._views.items()}

    def moved(self, watched: Sequence[Sequence[torch.Tensor]]) -> set[int]:
        """Return the owners of tensors that have other memory than when they were read.

        Args:
            watched: the same tensors.
        """
        owners = [owner for owner, tensors in enumerate(watched) for _ in tensors]
        triples = zip(owners, self._addresses, addresses(list(chain.from_iterable(watched))), strict=True)
        return {owner for owner, before, now in triples if before != now}


def any_differ(before: Values, now: Values) -> torch.Tensor | None:
    """Return on the device whether any bit differs, None where nothing was read.

    Args:
        before: what was read first.
        now: what was read later, of the same memory.
    """
    flags = [(_as_bits(before[kind]) != _as_bits(values)).any() for kind, values in now.items()]
    if len(flags) <= 1:
        return flags[0] if flags else None
    return torch.stack([flag.to(flags[0].device) for flag in flags]).any()


def differing_owners(owners: Mapping[Any, Sequence[int]], before: Values, now: Values) -> set[int]:
    """Return the owners of values whose bits differ; the host waits for the device.

    Args:
        owners: whose each of the values is, as :class:`Samples` says.
        before: what was read first.
        now: what was read later, of the same memory.
    """
    found: set[int] = set()
    for kind, of_values in owners.items():
        differ = _as_bits(before[kind]) != _as_bits(now[kind])
        if bool(differ.any()):
            last = differ.dim() - 1
            by_value = differ.any(dim=last) if last else differ  # complex values are pairs
            found |= {owner for owner, differs in zip(of_values, by_value.tolist(), strict=True) if differs}
    return found


@define
class ChangeRecord:
    """Records, for every piece, whether a step changed it; the host waits for nothing until it is asked.

    The first step compares all values. Later steps compare :data:`SAMPLE` values of each tensor, which costs two small
    kernels and finds a dense update; a tensor of which few rows have a gradient may be missed. With `exact` every step
    compares all values, at the price of two passes over the parameters. Without `every_step`, only the steps 1, 2, 4,
    8, ... compare.

    Args:
        exact: compare all values in every step.
        every_step: sample in every step: on a CPU, where that costs no launches.
    """

    exact: bool = False
    every_step: bool = True
    _steps: int = field(default=0, init=False)
    _compared: int = field(default=0, init=False)
    """The step that `_values` are of."""
    _how: str = field(default="no step yet", init=False)
    _first: bool = field(default=True, init=False)
    _all: _Digests = field(factory=_Digests, init=False)
    _some: Samples = field(factory=Samples, init=False)
    _reader: _Digests | Samples = field(init=False)
    _watched: Sequence[Sequence[torch.Tensor]] = field(default=(), init=False)
    _values: tuple[Values, Values] = field(factory=lambda: ({}, {}), init=False)

    def __attrs_post_init__(self) -> None:
        self._reader = self._all

    def before(self, watched: Sequence[Sequence[torch.Tensor]]) -> Values | None:
        """Return what :meth:`after` compares with; None: this step is not compared.

        Args:
            watched: for each piece the tensors in which a change shows, before the step.
        """
        self._steps += 1
        everything = self.exact or self._first
        if not (everything or self.every_step or self._steps.bit_count() == 1):
            return None
        self._reader = self._all if everything else self._some
        self._how = "all values compared" if everything else f"{SAMPLE} values of each compared"
        self._compared = self._steps
        return self._reader.read(watched)

    def after(
        self, watched: Sequence[Sequence[torch.Tensor]], before: Values | None, *, is_stepped: bool = True
    ) -> None:
        """Record what the step left behind.

        Args:
            watched: the same tensors, stepped.
            before: what :meth:`before` returned.
            is_stepped: one of them had a gradient, here or on the rank that steps it.
        """
        if before is None:
            return
        if not is_stepped:
            self._how = "no parameter had a gradient"
        self._values, self._watched = (before, self._reader.read_again(watched)), watched
        self._first = False

    @property
    def method(self) -> str:
        """How changes were found, and in which step where that is not the last one."""
        if self._compared == self._steps:
            return self._how
        return f"{self._how} in step {self._compared} of {self._steps}"

    def skipped(self) -> None:
        """Record that a step was given up: it has changed nothing."""
        self._values, self._watched = ({}, {}), ()
        self._how, self._compared = "step skipped", self._steps

    def forget(self) -> None:
        """Let go of all memory of the tensors; which of them the last step changed is not known afterwards."""
        self._all, self._some = _Digests(), Samples()
        self._reader, self._first = self._all, True
        self._values, self._watched = ({}, {}), ()

    @property
    def has_step(self) -> bool:
        """True once a step was recorded, made or skipped."""
        return not self._first or self._how == "step skipped"

    @property
    def changed(self) -> list[bool]:
        """For each piece, whether the compared step changed it; empty before the first step."""
        changed = [False] * len(self._watched)
        before, after = self._values
        if before:
            for owner in self._reader.moved(self._watched):
                changed[owner] = True
            for kind, owners in self._reader.owners.items():
                for owner, differs in zip(owners, (before[kind] != after[kind]).tolist(), strict=True):
                    changed[owner] |= differs
        return changed
