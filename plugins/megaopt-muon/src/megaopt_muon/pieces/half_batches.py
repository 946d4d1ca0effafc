"""Matrices that an accelerator iterates in float16: put together by their sides, whichever way each lies."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import torch
from attrs import define, field

from megaopt_muon.choice.methods import MethodBook
from megaopt_muon.newton_schulz.half import half_scale, iterate_half
from megaopt_muon.newton_schulz.iteration import NewtonSchulz
from megaopt_muon.newton_schulz.norms import all_normalized
from megaopt_muon.newton_schulz.scaled import Scaled
from megaopt_muon.pieces.plans import MatrixPlan

__all__ = ["MOST", "HalfBatches", "Member"]

MOST: Final = 1 << 26
"""Elements that are iterated together: enough to fill an accelerator."""

type Member = tuple[int, int]
"""Index of a plan, and index of one of its pieces."""


@define(eq=False)
class _Batch:
    """Matrices of equal sides.

    Args:
        shape: of each, `[*batch, rows, columns]`, as it lies in the batch.
        runs: how its steps are run.
        missing: the members that have not come.
        came: those that have, in the order in which they lie in memory, each with whether it lies transposed.
        memory: `[members, *shape]`, from the first that comes on.
    """

    shape: tuple[int, ...]
    runs: tuple[int, ...]
    missing: set[Member]
    came: list[tuple[Member, bool]] = field(factory=list)
    memory: torch.Tensor | None = None

    @property
    def scale(self) -> float:
        """The norm with which matrices begin."""
        return half_scale(min(self.shape[-2:]))

    def take(self, found: Mapping[Member, torch.Tensor], eps: float) -> None:
        """Take matrices in, each divided by its norm.

        Args:
            found: some of the members, of one dtype.
            eps: least norm that a matrix is divided by.
        """
        turned = {member: matrix.shape != self.shape for member, matrix in found.items()}
        matrices = [matrix.mT if turned[member] else matrix for member, matrix in found.items()]
        if self.memory is None:
            count = len(self.missing)
            self.memory = torch.empty((count, *self.shape), dtype=torch.float16, device=matrices[0].device)
        start = len(self.came)
        all_normalized(matrices, self.memory[start : start + len(matrices)], eps, self.scale)
        self.came += turned.items()
        self.missing.difference_update(found)

    def orthogonalized(self, ns: NewtonSchulz) -> list[tuple[Member, Scaled]]:
        """Return what becomes of its members, which have all come.

        Args:
            ns: how to orthogonalize.
        """
        assert self.memory is not None  # noqa: S101 - a batch has members
        rows, columns = self.shape[-2:]
        flat, self.memory = self.memory.view(-1, rows, columns), None
        matrices = flat if len(flat) > 1 else flat[0]
        done = iterate_half(matrices, ns.coefficients, self.runs, self.scale, tall=rows > columns)
        results = done.view(len(self.came), *self.shape)
        return [
            (member, Scaled(o.mT if is_turned else o, 1.0 / self.scale))
            for (member, is_turned), o in zip(self.came, results, strict=True)
        ]


@define(eq=False)
class HalfBatches:
    """The batches of many updates, each of which is iterated when all of its matrices have come.

    A batch holds matrices of one smaller and one larger side; where some are tall and others wide, the tall ones lie
    transposed. A matrix takes 2 bytes an element from when it comes until its batch is done: its update is not needed
    any more.

    Args:
        ns: how to orthogonalize.
        plans: what each parameter consists of.
        members: the matrices, in the order in which they will come, each with the device that it is on.
        book: the methods to take; None: those of `ns`.
    """

    ns: NewtonSchulz
    plans: Sequence[MatrixPlan]
    members: Mapping[Member, torch.device]
    book: MethodBook | None = None
    _batch_of: dict[Member, _Batch] = field(init=False)

    @_batch_of.default
    def _cut_into_batches(self) -> dict[Member, _Batch]:
        alike: dict[Any, list[Member]] = {}
        for member, device in self.members.items():
            shape = self._shape(member)
            alike.setdefault((*shape[:-2], *sorted(shape[-2:]), device), []).append(member)
        batch_of: dict[Member, _Batch] = {}
        for members in alike.values():
            limit = max(1, MOST // math.prod(self._shape(members[0])))
            for start in range(0, len(members), limit):
                some = members[start : start + limit]
                batch_of |= dict.fromkeys(some, self._batch(some))
        return batch_of

    def _shape(self, member: Member) -> tuple[int, ...]:
        index, number = member
        return self.plans[index].pieces[number].shape

    def _batch(self, members: Sequence[Member]) -> _Batch:
        shapes = dict.fromkeys(map(self._shape, members))
        shape = min(shapes, key=lambda each: each[-2] - each[-1])  # a wide one, if there is any
        runs = self.ns.half_runs(shape, self.members[members[0]], self.book)
        return _Batch(shape, runs, set(members))

    def fill(self, found: Mapping[Member, torch.Tensor]) -> Iterator[list[tuple[Member, Scaled]]]:
        """Take matrices in, and yield what becomes of the members of each batch that has all of them now.

        Args:
            found: some of the members; they may be overwritten afterwards.
        """
        parts: dict[tuple[int, torch.dtype], dict[Member, torch.Tensor]] = {}
        for member, matrix in found.items():
            parts.setdefault((id(self._batch_of[member]), matrix.dtype), {})[member] = matrix
        for part in parts.values():
            batch = self._batch_of[next(iter(part))]
            batch.take(part, self.ns.eps)
            if not batch.missing:
                yield batch.orthogonalized(self.ns)
