"""Many rows told in few: repeated layers share a row, and a reason that many rows share stands once, below."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from typing import Any

from attrs import frozen

from megaopt_core.reporting._text_table import format_table, longest_line, wrapped

__all__ = ["Alike", "alike", "name_pattern", "numberless", "shown_count", "shown_rate", "table_with_reasons"]

_MANY = 3
"""So many rows with one reason send it below the table."""

_WIDE = 140
"""Where nobody limits lines, reasons go below a table that is wider."""


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


def numberless(reason: str) -> str:
    """Return a reason with a * for the numbers of the layers that it names, so that those of all layers are one.

    Args:
        reason: the reason.

    Example:
        >>> numberless("a product takes it at blocks.3.down; 3 parts of it are used apart")
        'a product takes it at blocks.*.down; 3 parts of it are used apart'
    """
    return re.sub(r"\.\d+(?=[.;, )]|$)", ".*", reason)


def table_with_reasons(
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    width: int | None,
    *,
    doubtful: Collection[int] = (),
    right: Sequence[str] = (),
) -> str:
    """Return a table whose last column is reasons: one that three rows share, or more, stands once, below.

    Where a line is too long nevertheless, every reason goes below, and cells are wrapped.

    Args:
        header: the columns' names.
        rows: their cells.
        width: longest line; None: 140, but no cell is wrapped.
        doubtful: positions of rows whose reason gets a question mark.
        right: names of columns that are aligned to the right.

    Example:
        >>> rows = [["a.bias", "a bias"], ["weight", "a matrix"], ["b.bias", "a bias"], ["c.bias", "a bias"]]
        >>> print(table_with_reasons(["name", "why"], rows, 80))
        name    why
        ------  --------
        a.bias  [1]
        weight  a matrix
        b.bias  [1]
        c.bias  [1]
        <BLANKLINE>
        [1] a bias
    """
    counts = Counter(row[-1] for row in rows if row[-1])

    def table(below: Iterable[str], width: int | None) -> str:
        marks = {reason: f"[{number}]" for number, reason in enumerate(below, start=1)}
        cells = [
            [*row, marks.get(reason, reason) + (" ?" if index in doubtful else "")]
            for index, (*row, reason) in enumerate(rows)
        ]
        text = format_table(header, cells, width=width, right=right)
        return f"{text}\n\n{_notes(marks, width)}" if marks else text

    text = table([reason for reason, count in counts.items() if count >= _MANY], None)
    return text if longest_line(text) <= (width or _WIDE) else table(counts, width)


def _notes(marks: Mapping[str, str], width: int | None) -> str:
    """Return reasons behind their marks, with the lines of each under its first."""
    indent = max(map(len, marks.values())) + 1
    lines = []
    for reason, mark in marks.items():
        parts = wrapped(reason, None if width is None else max(width - indent, 20))
        lines += [
            f"{first:<{indent}}{part}" for first, part in zip([mark] + [""] * len(parts), parts, strict=False)
        ]
    return "\n".join(lines)


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
