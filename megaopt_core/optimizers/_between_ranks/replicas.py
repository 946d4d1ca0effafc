"""Whether the ranks that hold replicas hold the same values."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from attrs import evolve, field, frozen

from megaopt_core.errors import MegaoptError, RankMismatchError
from megaopt_core.optimizers._between_ranks.alike import (
    held_alike,
    schedules_alike,
    settings_of_groups,
    stepped_alike,
)
from megaopt_core.optimizers._between_ranks.each_step import StepAgreement
from megaopt_core.optimizers._between_ranks.gradients import (
    GRADIENT,
    UNREDUCED,
    held_gradients,
    unreduced_gradients,
)
from megaopt_core.optimizers._between_ranks.held import Held, Holder
from megaopt_core.parallel._agreement import (
    Comparison,
    Rows,
    described,
    differences_over_ranks,
    fingerprint,
)
from megaopt_core.parallel._digest import digest_of_tensors
from megaopt_core.parallel._groups import ProcessGroupCollection, communicates

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from megaopt_core.optimizers._base import MegatronOptimizer

__all__ = ["Replicas"]

_REMEDY = (
    "Give all of these ranks the values of one: broadcast_params() of DistributedDataParallel, "
    "torch.distributed.broadcast, or the same checkpoint; then call optimizer.reload_model_params(). Ranks that hold "
    "models of their own say so with pg_collection=ProcessGroupCollection() at the build. Where they hold parts of one "
    "tensor, pg_collection names them (a DeviceMesh with a dimension 'tp'), and the parameter is marked: "
    "param.tensor_model_parallel = True, param.partition_dim = the dimension that is cut"
)

_UNLIKE = "ranks are about to step unlike each other, and would drift apart; none has stepped"

_UNLIKE_REMEDY = (
    "Do on all of these ranks what was done on some: freeze or unfreeze the same parameters, give the same ones a "
    "gradient (None on one rank is none; reduce zeros there), clear gradients, write the same settings, make the same "
    "scheduler, give the model the same values (broadcast_params() of DistributedDataParallel, "
    "torch.distributed.broadcast). Ranks that hold models of their own say so with "
    "pg_collection=ProcessGroupCollection() at the build"
)


@frozen(eq=False)
class Replicas:
    """What a rank and others hold alike.

    Args:
        pgs: the process groups.
        by_hand: nothing was compared when the optimizer was made: classes, settings, names and shapes are, too.
    """

    pgs: ProcessGroupCollection
    by_hand: Sequence[Comparison] = ()
    _each_step: StepAgreement | None = field(init=False)

    @_each_step.default
    def _each_step_of_replicas(self) -> StepAgreement | None:
        group = self.pgs.dense_dp
        return StepAgreement(group) if communicates(group) else None

    @classmethod
    def of_all(cls, several: Sequence[Replicas]) -> Replicas | None:
        """Return what is to be alike of optimizers that are stepped as one; None where nothing is.

        Args:
            several: one for each optimizer that has replicas; they have the same process groups.
        """
        if len(several) < 2:
            return several[0] if several else None
        by_hand = [
            _of_one(index, comparison) for index, each in enumerate(several) for comparison in each.by_hand
        ]
        return cls(several[0].pgs, by_hand)

    def differences(
        self,
        optimizer: MegatronOptimizer,
        pgs: ProcessGroupCollection | None = None,
        *,
        everything: bool = False,
        own_settings: bool = True,
        gradients: Iterable[Held] = (),
    ) -> tuple[str, ...]:
        """Return what has other values on which ranks, one line each; a collective.

        Args:
            optimizer: what this rank holds.
            pgs: the ranks that compare; None: all.
            everything: buffers too, and all of the state; False: what a step needs alike, and a sample of the state.
            own_settings: settings of groups too that an optimizer may write itself.
            gradients: those that are compared.
        """
        optimizer.watched_model.finish_param_sync()
        pgs = self.pgs if pgs is None else pgs
        alike = [
            *self.by_hand,
            *settings_of_groups(optimizer, pgs, everything=own_settings),
            *schedules_alike(optimizer),
            *stepped_alike(optimizer, pgs),
            *held_alike(optimizer.watched_model.named_chunks(), optimizer.names, pgs, everything=everything),
            *_comparisons([*Holder(optimizer, pgs).held(everything=everything), *gradients]),
        ]
        return differences_over_ranks(pgs, "comparing the values of replicas", alike)

    def before_step(self, optimizer: MegatronOptimizer, refused: MegaoptError | None) -> MegaoptError | None:
        """Compare how ranks are about to step, and tell them of one that cannot; a collective.

        Args:
            optimizer: what this rank holds.
            refused: why this rank cannot step; None: it can.

        Returns:
            Why this rank cannot step, or that another one cannot.

        Raises:
            RankMismatchError: ranks would step unlike each other; it names what differs, and ranks.
        """
        agreement = self._each_step
        if agreement is None or not agreement.differs(optimizer, refused):
            return refused
        refused = agreement.told_of_refusals(refused)
        if refused is not None:
            return refused
        gradients = held_gradients(agreement.compared)
        lines = self.differences(optimizer, agreement.pgs, own_settings=False, gradients=gradients)
        if lines:
            raise RankMismatchError(described(_UNLIKE, lines, _UNLIKE_REMEDY), differences=lines)
        agreement.passed()
        if optimizer.late is not None:
            optimizer.late.joined = 0  # what has joined is alike
        return None

    @property
    def have_gradients(self) -> bool:
        """Whether some rank had a gradient, when ranks compared last; False where none compare."""
        return self._each_step is not None and self._each_step.has_gradients

    def require_equal(self, optimizer: MegatronOptimizer, when: str, *, first: bool = False) -> None:
        """Raise on all ranks unless all replicas have the same values; a collective.

        Args:
            optimizer: what this rank holds.
            when: when that is, in words.
            first: gradients are there for the first step; of those that somebody else reduces it is compared, too.

        Raises:
            RankMismatchError: it names what differs, and ranks.
        """
        gradients = unreduced_gradients(optimizer) if first else []
        lines = self.differences(optimizer, gradients=gradients)
        unreduced = bool(lines) and all(line.startswith(GRADIENT) for line in lines)
        if lines:
            what = "replicas have other gradients" if unreduced else "replicas have other values"
            advice = UNREDUCED if unreduced else _REMEDY
            raise RankMismatchError(
                described(f"{what} {when}, and would keep them", lines, advice), differences=lines
            )


def _of_one(index: int, comparison: Comparison) -> Comparison:
    """Return a comparison of one of several optimizers, each of which has its own."""

    def rows() -> Rows:
        return [(f"optimizer{index}: {name}", said) for name, said in comparison.rows()]

    return evolve(comparison, what=f"{comparison.what} of optimizer{index}", rows=rows)


def _comparisons(held: Iterable[Held]) -> list[Comparison]:
    """Return one comparison for each group: of all that its ranks hold replicas of."""
    kinds: dict[tuple[ProcessGroup, ...], list[Held]] = {}
    for each in held:
        kinds.setdefault(each.groups, []).append(each)
    digests = {groups: _digest(some) for groups, some in kinds.items()}
    by_ranks: dict[tuple[int, ...], tuple[ProcessGroup, list[tuple[ProcessGroup, ...]]]] = {}
    for groups in kinds:
        for group in groups:
            ranks = tuple(dist.get_process_group_ranks(group))
            by_ranks.setdefault(ranks, (group, []))[1].append(groups)
    return [
        _comparison(
            group, fingerprint([digests[groups] for groups in some]), [kinds[groups] for groups in some]
        )
        for group, some in by_ranks.values()
    ]


def _digest(held: Sequence[Held]) -> bytes:
    tensors = [tensor for tensor in (each.tensor for each in held) if tensor is not None]
    labels, words = [each.label for each in held], [each.words for each in held]
    return fingerprint((labels, words, digest_of_tensors(tensors)))


def _comparison(group: ProcessGroup, digest: bytes, held: Sequence[Sequence[Held]]) -> Comparison:
    def rows() -> Rows:
        return [(each.label, {"": said}) for some in held for each in some if (said := _shown(each))]

    # Tensor-parallel ranks may have parameters that others have not: those of the same name count.
    return Comparison("the values of replicas", digest, rows, group, everywhere=False)


def _shown(held: Held) -> str:
    """Return what there is to say of a value; nothing where its bits cannot be read."""
    tensor = held.tensor
    if tensor is None:
        return held.words
    norm = torch.linalg.vector_norm(tensor.to(torch.complex128 if tensor.is_complex() else torch.float64))
    return f"norm {norm.item():.6g} (digest {digest_of_tensors([tensor]).hex()[:8]})"
