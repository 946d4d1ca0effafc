"""The parameters of all ranks of a pipeline stage, from what each rank has."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from attrs import evolve, frozen

from megaopt_core.errors import RoutingError
from megaopt_core.parallel._groups import ProcessGroupCollection, communicates
from megaopt_core.parallel._reduction import gather_objects
from megaopt_core.params._shards import AxisPlacement, RankCoordinates
from megaopt_core.params._specs import ParamSpec
from megaopt_core.sharding._layout import World

__all__ = ["specs_of_stage"]

_WHAT = "telling the ranks of a pipeline stage which parameters it has"
_STAGE_AXES = ("tp", "expert_tp", "ep", "dp", "expert_dp", "dp_replicate", "expert_dp_replicate")

type _Rank = tuple[tuple[str, int], ...]
"""Where a rank stands on each axis of a stage."""


@frozen
class _Held:
    """What some ranks have: where they stand, their parameters in order, and a digest of these."""

    ranks: tuple[_Rank, ...]
    specs: tuple[ParamSpec, ...]
    digest: bytes = b""


def specs_of_stage(
    mine: Sequence[ParamSpec],
    pgs: ProcessGroupCollection,
    rank: RankCoordinates,
    world: World,
    digest: bytes = b"",
) -> tuple[ParamSpec, ...]:
    """Return the parameters of all ranks of this pipeline stage: a collective over each of its axes.

    Where all ranks have the same ones, as they do without experts, only a digest travels. A parameter that only the
    ranks at one place of an axis have gets a placement that says so.

    Args:
        mine: what this rank has, in model order.
        pgs: the process groups.
        rank: this rank's coordinates.
        world: number of ranks along each axis.
        digest: of what this rank has; empty: computed here.

    Raises:
        RoutingError: two ranks have different parameters of one name.
        CommunicationError: another rank has stopped, or the process group's timeout is over.
    """
    here = tuple((axis, rank.get(axis, 0)) for axis in _STAGE_AXES)
    held = [_Held((here,), tuple(mine), digest or _digest(mine))]
    for axis in _STAGE_AXES:
        held = _joined(held, pgs.of_axis(axis))
    if len(held) == 1:
        return held[0].specs
    return _merged(held, world)


def _joined(held: list[_Held], group: Any) -> list[_Held]:
    """Return what all ranks of a group hold, those with the same parameters together."""
    if not communicates(group):
        return held
    told = gather_objects([(entry.ranks, entry.digest) for entry in held], group, _WHAT)
    known = {entry.digest: entry.specs for entry in held}
    # A rank that knows all digests answers those that do not: they ask together.
    if len({frozenset(digest for _, digest in theirs) for theirs in told}) > 1:
        for there in gather_objects(known, group, _WHAT):
            known = there | known
    joined: dict[bytes, set[_Rank]] = {}
    for theirs in told:
        for ranks, digest in theirs:
            joined.setdefault(digest, set()).update(ranks)
    return [_Held(tuple(sorted(ranks)), known[digest], digest) for digest, ranks in joined.items()]


def _digest(specs: Iterable[ParamSpec]) -> bytes:
    digest = hashlib.sha256()
    for spec in specs:
        digest.update(repr(spec).encode())
    return digest.digest()


def _merged(held: Sequence[_Held], world: World) -> tuple[ParamSpec, ...]:
    """Return every parameter once, with the only place where it is, if there is one."""
    specs: dict[str, ParamSpec] = {}
    ranks: dict[str, list[Mapping[str, int]]] = {}
    for entry in sorted(held, key=lambda entry: entry.ranks):
        places = [dict(rank) for rank in entry.ranks]
        for spec in entry.specs:
            other = specs.setdefault(spec.name, spec)
            if other != spec:
                raise RoutingError(
                    f"ranks have different parameters {spec.name!r}: {spec} and {other}. Give all ranks the same "
                    "model, configuration and overrides; or give the parameters names of their own (fqn=...)",
                    names=[spec.name],
                )
            ranks.setdefault(spec.name, []).extend(places)
    everywhere = sum(len(entry.ranks) for entry in held)
    return tuple(
        spec if len(ranks[name]) == everywhere else evolve(spec, placements=_placed(spec, ranks[name], world))
        for name, spec in specs.items()
    )


def _placed(spec: ParamSpec, ranks: Sequence[Mapping[str, int]], world: World) -> tuple[AxisPlacement, ...]:
    known = {placement.axis for placement in spec.placements}
    only = []
    for axis in _STAGE_AXES:
        places = {rank[axis] for rank in ranks}
        if axis not in known and world.size(axis) > 1 and len(places) == 1:
            only.append(AxisPlacement(axis, world.size(axis), index=places.pop()))
    return (*only, *spec.placements)
