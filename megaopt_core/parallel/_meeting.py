"""Ranks that meet: what each of them tells all others, and who is missing where not all have come."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch.distributed as dist

from megaopt_core.errors import MissingRanksError
from megaopt_core.parallel._groups import ProcessGroupCollection, communicates, is_distributed
from megaopt_core.parallel._reduction import gather_objects, stopped
from megaopt_core.parallel._timeouts import timeout_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["DATA_PARALLEL", "EVERYONE", "gather_over_ranks", "shown_ranks", "takes_part", "this_rank"]

EVERYONE = (
    "intra_dist_opt",
    "inter_dist_opt",
    "dp_cp",
    "dp",
    "cp",
    "expt_dp",
    "inter_expt_dist_opt",
    "mp",
    "tp_ep_pp",
    "pp",
    "tp",
    "ep",
    "expt_tp",
    "intra_dp_cp",
    "intra_expt_dp",
)
"""All groups of a collection: those that are usually parts of another come after it."""

DATA_PARALLEL = ("dp_cp", "dp", "expt_dp")
"""The groups over which gradients are reduced."""

_DEFAULT_TIMEOUT = timedelta(minutes=30)

_meetings: WeakKeyDictionary[ProcessGroup, int] = WeakKeyDictionary()
"""How often the ranks of a group have met."""


def this_rank() -> int:
    """Return this process's rank in the default group; 0 in a single process."""
    return dist.get_rank() if is_distributed() else 0


def takes_part(pgs: ProcessGroupCollection) -> bool:
    """Return whether any group of a collection has ranks to tell something to.

    Args:
        pgs: the process groups.
    """
    return bool(_groups_of(pgs, EVERYONE))


def gather_over_ranks[T](
    value: T, pgs: ProcessGroupCollection, what: str, names: tuple[str, ...] = EVERYONE
) -> dict[int, T]:
    """Gather one value of every rank of a collection of process groups, group by group.

    Groups of one rank do nothing. The ranks of a group first wait for each other, so that nobody enters a collective
    that others will never enter.

    Args:
        value: this rank's value; picklable.
        pgs: the process groups.
        what: what they meet for, in words, for errors.
        names: names of the groups that take part.

    Returns:
        Rank in the default group to value, in the order of ranks.

    Raises:
        MissingRanksError: some rank of a group has not come before the group's timeout was over.
        CommunicationError: a rank has stopped meanwhile.
    """
    known = {this_rank(): value}
    for group in _groups_of(pgs, names):
        _meet(group, what)
        for some in gather_objects(known, group, what):
            known.update(some)
    return dict(sorted(known.items()))


def _groups_of(pgs: ProcessGroupCollection, names: tuple[str, ...]) -> Mapping[ProcessGroup, set[int]]:
    """Return the groups that tell this rank something new: none that is a part of one before it."""
    chosen: dict[ProcessGroup, set[int]] = {}
    for name in names:
        group = getattr(pgs, name)
        if group is None or not communicates(group):
            continue
        ranks = set(dist.get_process_group_ranks(group))
        if not any(ranks <= others for others in chosen.values()):
            chosen[group] = ranks
    return chosen


def _meet(group: ProcessGroup, what: str) -> None:
    """Return when all ranks of a group are here: they sign in at its store."""
    from torch.distributed.distributed_c10d import _get_process_group_store

    number, timeout = _meetings.get(group, 0), timeout_of(group) or _DEFAULT_TIMEOUT
    ranks, rank = dist.get_process_group_ranks(group), this_rank()
    key = f"megaopt/{group.group_name}/{number}"
    try:
        store = _get_process_group_store(group)
        store.set(f"{key}/{rank}", "here")
        if store.add(key, 1) == len(ranks):
            store.set(f"{key}/all", "here")
        _wait_for_all(store, key, ranks, what, timeout)
    except MissingRanksError:
        raise
    except RuntimeError as error:
        raise stopped(what, error) from error
    _meetings[group] = number + 1


def _wait_for_all(store: Any, key: str, ranks: list[int], what: str, timeout: timedelta) -> None:
    try:
        store.wait([f"{key}/all"], timeout)
    except RuntimeError:
        came = [rank for rank in ranks if store.check([f"{key}/{rank}"])]
        # Who comes back finds the meeting as if it had never been there.
        store.add(key, -1)
        if len(came) == len(ranks):
            raise
        raise _missing(what, came, ranks, timeout) from None


def _missing(what: str, came: list[int], ranks: list[int], timeout: timedelta) -> MissingRanksError:
    missing = [rank for rank in ranks if rank not in came]
    return MissingRanksError(
        f"{what}: {len(came)} of {len(ranks)} ranks came within {timeout.total_seconds():g} seconds; missing: "
        f"{shown_ranks(missing)}. All ranks of a process group must take part, in the same order. For a model that "
        "is on this rank alone, pass pg_collection=ProcessGroupCollection(), which waits for no rank",
        came=came,
        missing=missing,
    )


def shown_ranks(ranks: list[int]) -> str:
    """Return ranks in words, neighbours together.

    Args:
        ranks: in ascending order; at least one.

    Example:
        >>> shown_ranks([0, 2, 3, 4])
        'ranks 0, 2-4'
    """
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and runs[-1][-1] == rank - 1:
            runs[-1][1:] = [rank]
        else:
            runs.append([rank])
    words = ", ".join("-".join(map(str, run)) for run in runs)
    return f"rank{'s' * (len(ranks) > 1)} {words}"
