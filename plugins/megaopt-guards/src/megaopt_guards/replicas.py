"""The comparison of all that ranks hold replicas of: values, settings, schedules, gradients."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from megaopt_core import MegatronOptimizer
from megaopt_core.errors import RankMismatchError
from megaopt_core.optimizers import model_alike
from megaopt_core.parallel import (
    Comparison,
    Rows,
    described,
    differences_over_ranks,
    digest_of_tensors,
    fingerprint,
)
from megaopt_guards.fingerprints import by_hand_alike, schedules_alike, settings_of_groups, stepped_alike
from megaopt_guards.gradients import GRADIENT, UNREDUCED, unreduced_gradients
from megaopt_guards.replicated_values import ReplicatedValue, ReplicatedValues

__all__ = ["differences", "require_equal", "require_equal_steps"]

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


def differences(
    optimizer: MegatronOptimizer,
    *,
    everything: bool = False,
    groups: Iterable[Mapping[str, Any]] | None = None,
    gradients: Iterable[ReplicatedValue] = (),
) -> tuple[str, ...]:
    """Return what has other values on which ranks, one line each; a collective.

    Args:
        optimizer: what this rank holds.
        everything: buffers too, and all of the state; False: what a step needs alike, and a sample of the state.
        groups: settings of groups as they were before a step; None: all settings as they are.
        gradients: those that are compared.
    """
    optimizer.watched_model.finish_param_sync()
    pgs = optimizer.process_groups
    alike = [
        *by_hand_alike(optimizer),
        *settings_of_groups(optimizer, pgs, groups),
        *schedules_alike(optimizer),
        *stepped_alike(optimizer, pgs),
        *model_alike(optimizer.watched_model.named_chunks(), optimizer.names, pgs, everything=everything),
        *_comparisons([*ReplicatedValues(optimizer, pgs).all(everything=everything), *gradients]),
    ]
    return differences_over_ranks(pgs, "comparing the values of replicas", alike)


def require_equal_steps(
    optimizer: MegatronOptimizer, groups: Iterable[Mapping[str, Any]], gradients: Iterable[ReplicatedValue]
) -> None:
    """Raise on all ranks where replicas would step unlike each other; a collective.

    Args:
        optimizer: what this rank holds.
        groups: the settings that it was about to step with.
        gradients: those that it was about to step with.

    Raises:
        RankMismatchError: it names what differs, and ranks.
    """
    lines = differences(optimizer, groups=groups, gradients=gradients)
    if lines:
        raise RankMismatchError(described(_UNLIKE, lines, _UNLIKE_REMEDY), differences=lines)


def require_equal(optimizer: MegatronOptimizer, when: str, *, first: bool = False) -> None:
    """Raise on all ranks unless all replicas have the same values; a collective.

    Args:
        optimizer: what this rank holds.
        when: when that is, in words.
        first: gradients are there for the first step; of those that somebody else reduces it is compared, too.

    Raises:
        RankMismatchError: it names what differs, and ranks.
    """
    gradients = unreduced_gradients(optimizer) if first else []
    lines = differences(optimizer, gradients=gradients)
    unreduced = bool(lines) and all(line.startswith(GRADIENT) for line in lines)
    if lines:
        what = "replicas have other gradients" if unreduced else "replicas have other values"
        advice = UNREDUCED if unreduced else _REMEDY
        raise RankMismatchError(
            described(f"{what} {when}, and would keep them", lines, advice), differences=lines
        )


def _comparisons(values: Iterable[ReplicatedValue]) -> list[Comparison]:
    """Return one comparison for each group: of all that its ranks hold replicas of."""
    kinds: dict[tuple[ProcessGroup, ...], list[ReplicatedValue]] = {}
    for each in values:
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


def _digest(values: Sequence[ReplicatedValue]) -> bytes:
    tensors = [tensor for tensor in (each.tensor for each in values) if tensor is not None]
    labels, words = [each.label for each in values], [each.words for each in values]
    return fingerprint((labels, words, digest_of_tensors(tensors)))


def _comparison(
    group: ProcessGroup, digest: bytes, values: Sequence[Sequence[ReplicatedValue]]
) -> Comparison:
    def rows() -> Rows:
        return [(each.label, {"": said}) for some in values for each in some if (said := _shown(each))]

    # Tensor-parallel ranks may have parameters that others have not: those of the same name count.
    return Comparison("the values of replicas", digest, rows, group, everywhere=False)


def _shown(values: ReplicatedValue) -> str:
    """Return what there is to say of a value; nothing where its bits cannot be read."""
    tensor = values.tensor
    if tensor is None:
        return values.words
    norm = torch.linalg.vector_norm(tensor.to(torch.complex128 if tensor.is_complex() else torch.float64))
    return f"norm {norm.item():.6g} (digest {digest_of_tensors([tensor]).hex()[:8]})"
