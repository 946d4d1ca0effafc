"""Many rows told in few: repeated layers share a row, and a reason that many rows share stands once, below."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from typing import Any

from attrs import frozen

from megaopt_core.reporting._text_table import wrapped

__all__ = ["Alike", "Notes", "alike", "name_pattern", "notes_of", "shown_count", "shown_rate"]

_MANY = 3
"""So many rows with one reason send it below the table."""


@frozen
class Alike:
    """Parameters that differ in nothing but the numbers in their names.

    Args:
        name: the one's name, or the pattern of all; it can be used as the name of an override.
        members: which they are, in model order.
    """

    name: str
    members: tuple[Any, ...]


def name_pattern(name: str) -> str:
    """Return a parameter's name with a star for every part that is a number.

    Args:
        name: canonical name.

    Example:
        >>> name_pattern("transformer.h.11.mlp.c_fc.weight")
        'transformer.h.*.mlp.c_fc.weight'
    """
    return re.sub(r"(?<=\.)\d+(?=\.)", "*", f".{name}.")[1:-1]


def alike(rows: Iterable[tuple[str, Hashable, Any]]) -> list[Alike]:
    """Return rows together that have the same facts and the same pattern of a name.

    Args:
        rows: name, facts and the row itself of every parameter.

    Example:
        >>> alike([("h.0.w", "muon", 0), ("h.1.w", "muon", 1), ("norm", "adam", 2)])
        [Alike(name='h.*.w', members=(0, 1)), Alike(name='norm', members=(2,))]
    """
    groups: dict[Any, list[tuple[str, Any]]] = {}
    for name, facts, row in rows:
        groups.setdefault((name_pattern(name), facts), []).append((name, row))
    return [
        Alike(found[0][0] if len(found) == 1 else pattern, tuple(row for _, row in found))
        for (pattern, _), found in groups.items()
    ]


@frozen
class Notes:
    """Reasons of rows, in the row or below the table.

    Args:
        cells: for every row its reason, or the number of the note that is its reason.
        below: the notes.
    """

    cells: tuple[str, ...]
    below: tuple[str, ...]

    def text(self, width: int | None) -> str:
        """Return the lines below the table; empty without notes.

        Args:
            width: longest line; None: no limit.
        """
        marks = [f"[{number}]" for number in range(1, len(self.below) + 1)]
        indent = len(marks[-1]) + 1 if marks else 0
        lines = []
        for mark, note in zip(marks, self.below, strict=True):
            parts = wrapped(note, None if width is None else max(width - indent, 20))
            lines += [
                f"{first:<{indent}}{part}"
                for first, part in zip([mark] + [""] * len(parts), parts, strict=False)
            ]
        return "\n".join(lines)


def notes_of(reasons: Sequence[str], *, all_below: bool = False) -> Notes:
    """Return reasons so that one that three rows share, or more, stands once.

    Args:
        reasons: of every row.
        all_below: every reason goes below, because a table has no room for any.

    Example:
        >>> notes_of(["a bias", "a matrix", "a bias", "a bias"])
        Notes(cells=('[1]', 'a matrix', '[1]', '[1]'), below=('a bias',))
    """
    counts = Counter(reasons)
    below = tuple(reason for reason in counts if reason and (all_below or counts[reason] >= _MANY))
    numbers = {reason: f"[{number}]" for number, reason in enumerate(below, start=1)}
    return Notes(tuple(numbers.get(reason, reason) for reason in reasons), below)


def shown_count(shape: Sequence[int], count: int) -> str:
    """Return a shape, and of how many parameters it is.

    Args:
        shape: of one of them.
        count: how many share it.

    Example:
        >>> shown_count((768, 3072), 12), shown_count((), 1)
        ('12 of 768x3072', 'scalar')
    """
    shown = "x".join(map(str, shape)) or "scalar"
    return shown if count == 1 else f"{count} of {shown}"


def shown_rate(value: float | None) -> str:
    """Return a learning rate or weight decay as people write it.

    Args:
        value: the number; None: there is none.

    Example:
        >>> [shown_rate(rate) for rate in (3e-4, 0.02, 1.0, 2.5e-05, 0.0, None)]
        ['3e-4', '0.02', '1', '2.5e-5', '0', '-']
    """
    if value is None:
        return "-"
    if value == 0 or abs(value) >= 0.01:
        return f"{value:.6g}"
    number, _, power = f"{value:.5e}".partition("e")
    return f"{number.rstrip('0').rstrip('.')}e{int(power)}"
