"""What ranks must have alike: compared by digests, and named where it differs."""

from __future__ import annotations

import hashlib
import marshal
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

import torch.distributed as dist
from attrs import field, frozen

from megaopt_core.errors import MegaoptError, RankMismatchError, RoutingError
from megaopt_core.parallel._groups import ProcessGroupCollection, communicates
from megaopt_core.parallel._meeting import EVERYONE, gather_over_ranks, shown_ranks

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["Comparison", "Rows", "agree_over_ranks", "described", "differences_over_ranks", "fingerprint"]

type Rows = Sequence[tuple[str, Mapping[str, str]]]
"""What a rank has, readable: names in order, and for each what there is to say about it, by subject."""

type _Ranks = tuple[int, ...]

type _Key = tuple[str, _Ranks]
"""What is compared on which ranks; none for all that take part."""

_SHOWN = 8


@frozen(eq=False)
class Comparison:
    """Something that some ranks must have alike.

    Args:
        what: it, in words.
        digest: equal on two ranks exactly when what they have is.
        rows: what this rank has, readable; asked for only where digests differ.
        group: the ranks; None: all that take part. In a group of one rank nothing is compared.
        everywhere: a name that some rank lacks is a difference, and so is another order. False: only what is said of a
            name on several ranks is compared.
    """

    what: str
    digest: bytes
    rows: Callable[[], Rows]
    group: ProcessGroup | None = None
    everywhere: bool = True

    @classmethod
    def of_rows(cls, what: str, rows: Rows, group: ProcessGroup | None) -> Self:
        """Return the comparison of all that there is to say.

        Args:
            what: what is compared.
            rows: what this rank has.
            group: the ranks that must have it alike; None: all that take part.
        """
        return cls(
            what, fingerprint([(name, list(said.items())) for name, said in rows]), lambda: rows, group
        )

    @property
    def key(self) -> _Key:
        """What is compared on which ranks; none for all that take part."""
        ranks = () if self.group is None else tuple(dist.get_process_group_ranks(self.group))
        return self.what, ranks


@frozen
class _Told:
    """What a rank tells the others."""

    value: Any
    error: str | None
    digests: Mapping[_Key, bytes] = field(factory=dict)


def fingerprint(value: Any) -> bytes:
    """Return a digest of plain data: numbers, strings, None, and tuples, lists and dictionaries of them.

    Args:
        value: the data.

    Example:
        >>> fingerprint(("lr", 0.1)) == fingerprint(("lr", 0.1)) != fingerprint(("lr", 0.2))
        True
    """
    # Version 2 writes what a value is; later ones write also which objects happen to be the same.
    try:
        written = marshal.dumps(value, 2)
    except ValueError:  # a class derived from one of these
        written = repr(value).encode()
    return hashlib.sha256(written).digest()


def agree_over_ranks[T](
    mine: T,
    pgs: ProcessGroupCollection,
    what: str,
    *,
    error: MegaoptError | None = None,
    alike: Sequence[Comparison] = (),
    names: tuple[str, ...] = EVERYONE,
    advice: str = "",
    unless: Callable[[list[T]], bool] | None = None,
) -> list[T]:
    """Gather one value of every rank of the process groups, and raise on all where one failed or ranks differ.

    Args:
        mine: this rank's value; picklable.
        pgs: the process groups; without any of several ranks nothing is communicated.
        what: what ranks agree on, in words, for errors.
        error: what went wrong on this rank, None when nothing did.
        alike: what ranks must have alike.
        names: names of the process groups that take part.
        advice: what to do about a difference.
        unless: whether the values of all ranks say that nothing is to be compared now.

    Returns:
        The values in rank order; `[mine]` for a rank alone.

    Raises:
        MegaoptError: this rank's error, or a :class:`RoutingError` that tells of another rank's.
        RankMismatchError: ranks differ.
        MissingRanksError: some rank of a group has not come.
    """
    compared = _compared(alike)
    told = _Told(
        mine,
        None if error is None else f"{type(error).__name__}: {error}",
        {key: comparison.digest for key, comparison in compared.items()},
    )
    gathered = gather_over_ranks(told, pgs, what, names)
    if error is not None:
        raise error
    for rank, other in gathered.items():
        if other.error is not None:
            raise RoutingError(f"rank {rank} cannot route its parameters: {other.error}")
    values = [other.value for other in gathered.values()]
    if unless is not None and unless(values):
        return values
    lines = _lines(gathered, compared, pgs, what, names)
    if lines:
        raise RankMismatchError(described(f"{what}: ranks differ", lines, advice), differences=lines)
    return values


def described(what: str, lines: Sequence[str], advice: str) -> str:
    """Return the message of an error about differences.

    Args:
        what: its first line.
        lines: the differences, of which the first few are shown.
        advice: its last line; empty: none.
    """
    more = [f"and {len(lines) - _SHOWN} more"] if len(lines) > _SHOWN else []
    return "\n".join([what, *(f"  {line}" for line in (*lines[:_SHOWN], *more)), *filter(None, [advice])])


def differences_over_ranks(
    pgs: ProcessGroupCollection, what: str, alike: Sequence[Comparison]
) -> tuple[str, ...]:
    """Return in what ranks differ, one line each, the same on all of them; empty when all is alike.

    Args:
        pgs: the process groups; without any of several ranks nothing is communicated.
        what: what ranks compare, in words, for errors.
        alike: what ranks must have alike.

    Raises:
        MissingRanksError: some rank of a group has not come.
    """
    compared = _compared(alike)
    told = _Told(None, None, {key: comparison.digest for key, comparison in compared.items()})
    return tuple(_lines(gather_over_ranks(told, pgs, what), compared, pgs, what, EVERYONE))


def _compared(alike: Iterable[Comparison]) -> dict[_Key, Comparison]:
    return {each.key: each for each in alike if each.group is None or communicates(each.group)}


def _lines(
    gathered: Mapping[int, _Told],
    compared: Mapping[_Key, Comparison],
    pgs: ProcessGroupCollection,
    what: str,
    names: tuple[str, ...],
) -> list[str]:
    """Return what differs, one line each: the same on every rank, since every rank knows the same."""
    differing = _differing(gathered)
    if not differing:
        return []
    # One rank of those that are alike tells what it has.
    mine = {
        key: (list(compared[key].rows()), compared[key].everywhere) for key in differing if key in compared
    }
    all_rows = gather_over_ranks(mine, pgs, what, names)
    return [
        line
        for key, unlike in differing.items()
        for line in _differences(key[0], {ranks: all_rows[ranks[0]].get(key) for ranks in unlike})
    ]


def _differing(gathered: Mapping[int, _Told]) -> dict[_Key, list[_Ranks]]:
    """Return what has unlike digests, to the ranks that are alike, in the order of their first ones."""
    found: dict[_Key, list[_Ranks]] = {}
    for key in sorted({key for told in gathered.values() for key in told.digests}):
        by_digest: dict[bytes | None, list[int]] = defaultdict(list)
        for rank in key[1] or gathered:
            if rank in gathered:
                by_digest[gathered[rank].digests.get(key)].append(rank)
        if len(by_digest) > 1:
            found[key] = sorted(map(tuple, by_digest.values()))
    return found


def _differences(what: str, told: Mapping[_Ranks, tuple[Rows, bool] | None]) -> list[str]:
    everywhere = all(entry is None or entry[1] for entry in told.values())
    rows = {ranks: dict(entry[0]) if entry is not None else {} for ranks, entry in told.items()}
    lines = []
    for name in dict.fromkeys(name for some in rows.values() for name in some):
        present = {ranks: some[name] for ranks, some in rows.items() if name in some}
        if len(present) < len(rows) and everywhere:
            absent = _joined(ranks for ranks in rows if ranks not in present)
            lines.append(f"{what}: {name} is on {_joined(present)}, not on {absent}")
            continue
        for subject in dict.fromkeys(subject for said in present.values() for subject in said):
            values = {ranks: said.get(subject, "nothing") for ranks, said in present.items()}
            if len(set(values.values())) > 1:
                lines.append(f"{' '.join(filter(None, (name, subject)))}: {_by_value(values)}")
    if not lines and everywhere:
        lines += _order(what, {ranks: list(some) for ranks, some in rows.items()})
    return lines


def _order(what: str, names: Mapping[_Ranks, list[str]]) -> list[str]:
    """Return where ranks with the same names have them in another order."""
    for position, there in enumerate(zip(*names.values(), strict=True)):
        if len(set(there)) > 1:
            values = dict(zip(names, there, strict=True))
            return [f"{what}: registered in another order, number {position} is {_by_value(values)}"]
    return [f"{what}: their digests differ on {_joined(names)}"]


def _by_value(values: Mapping[_Ranks, str]) -> str:
    by_value: dict[str, list[_Ranks]] = defaultdict(list)
    for ranks, value in values.items():
        by_value[value].append(ranks)
    return "; ".join(f"{value} on {_joined(ranks)}" for value, ranks in by_value.items())


def _joined(several: Iterable[_Ranks]) -> str:
    return shown_ranks(sorted(rank for ranks in several for rank in ranks))
