"""Plain-text tables for reports and the command line."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, zip_longest

__all__ = ["fitted_table", "format_table", "longest_line", "wrapped"]

_GAP = 2
_NARROWEST = 10

_MARKS = (".", "_-/,")
"""After what a name is broken that is too long for its line: the first as long as that is enough."""


def format_table(
    header: Sequence[str],
    rows: Sequence[Sequence[object]],
    *,
    width: int | None = None,
    right: Sequence[str] = (),
) -> str:
    """Return rows in aligned columns under a header and a rule.

    Args:
        header: the columns' names.
        rows: cells; each is shown with `str`.
        width: longest line; cells of the widest columns are wrapped to keep it: between words as long as that is
            enough, then names after a dot, then after a mark such as `_`, and anything else only where that does not
            help. No column becomes narrower than ten letters. None: no limit.
        right: names of columns that are aligned to the right.

    Example:
        >>> print(format_table(["name", "lr"], [["weight", 0.1], ["b", 0.25]], right=["lr"]))
        name      lr
        ------  ----
        weight   0.1
        b       0.25
        >>> print(format_table(["name", "why"], [["h.0.mlp.weight", "a matrix of a layer"]], width=21))
        name       why
        ---------  ----------
        h.0.mlp.   a matrix
        weight     of a layer
    """
    cells = [list(header), *([str(cell) for cell in row] for row in rows)]
    columns = list(zip(*cells, strict=True))
    widths = [max(map(len, column)) for column in columns]
    if width is not None:
        available = width - _GAP * (len(widths) - 1)
        limits = (
            _longest_parts(columns, ""),
            _longest_parts(columns, _MARKS[0]),
            _longest_parts(columns, "".join(_MARKS)),
            _narrowest(header, widths),
        )
        tried = [_narrowed(widths, least, available) for least in limits]
        widths = next((sizes for sizes in tried if sum(sizes) <= available), tried[-1])
    names, *others = [_lines_of(row, widths) for row in cells]
    lines = []
    for line in chain(names, [["-" * size for size in widths]], *others):
        aligned = [
            cell.rjust(size) if name in right else cell.ljust(size)
            for cell, size, name in zip(line, widths, header, strict=True)
        ]
        lines.append((" " * _GAP).join(aligned).rstrip())
    return "\n".join(lines)


def fitted_table(
    header: Sequence[str],
    rows: Sequence[Mapping[str, object]],
    width: int | None,
    *,
    optional: Sequence[str],
    right: Sequence[str] = (),
) -> str:
    """Return a table that leaves out columns where a line is too long; cells are wrapped only where that is not enough.

    Args:
        header: the columns' names.
        rows: cells by column; a dash stands for one that is missing or None.
        width: longest line; None: no limit.
        optional: columns that can be left out, the first of them first.
        right: names of columns that are aligned to the right.
    """
    cells = [["-" if row.get(name) is None else row[name] for name in header] for row in rows]
    text = format_table(header, cells, right=right)
    if width is None or longest_line(text) <= width:
        return text
    if not optional:
        return format_table(header, cells, width=width, right=right)
    kept = [name for name in header if name != optional[0]]
    return fitted_table(kept, rows, width, optional=optional[1:], right=right)


def longest_line(text: str) -> int:
    """Return the length of the longest line of a text.

    Args:
        text: one or more lines.
    """
    return max(map(len, text.splitlines()))


def wrapped(text: str, width: int | None) -> list[str]:
    """Return a text in lines: broken between words, long names after a dot or `_`, anything else where it must be.

    Args:
        text: the text.
        width: longest line; None: no limit.

    Example:
        >>> wrapped("transformer.h.0.attn.weight is a matrix", 14)
        ['transformer.h.', '0.attn.weight', 'is a matrix']
    """
    if width is None:
        return [text]
    lines = [""]
    for word in text.split():
        joined = f"{lines[-1]} {word}" if lines[-1] else word
        if len(joined) <= width:
            lines[-1] = joined
            continue
        if not lines[-1]:
            lines.pop()
        lines += _broken(word, width)
    return lines


def _broken(word: str, width: int, marks: Sequence[str] = _MARKS) -> list[str]:
    """Return one word in lines, broken after the first of the marks, then after the next, then anywhere."""
    if not marks:
        return [word[start : start + width] for start in range(0, len(word), width)]
    lines = [""]
    for part in _split_after(word, marks[0]):
        if len(lines[-1] + part) <= width:
            lines[-1] += part
        elif len(part) <= width:
            lines.append(part)
        else:
            lines += _broken(part, width, marks[1:])
    return [line for line in lines if line]


def _split_after(word: str, marks: str) -> list[str]:
    return [word] if not marks else re.split(f"(?<=[{re.escape(marks)}])", word)


def _longest_parts(columns: list[tuple[str, ...]], marks: str) -> list[int]:
    """Return, of every column, the longest part of a word that ends with one of the marks or with the word."""
    return [
        max(
            (len(part) for cell in column for word in cell.split() for part in _split_after(word, marks)),
            default=0,
        )
        for column in columns
    ]


def _narrowest(header: Sequence[str], widths: list[int]) -> list[int]:
    return [min(size, max(len(name), _NARROWEST)) for size, name in zip(widths, header, strict=True)]


def _narrowed(widths: list[int], least: list[int], available: int) -> list[int]:
    """Take from the widest column again and again until the sum fits, or nothing can be taken."""
    widths = list(widths)
    while sum(widths) > available:
        column = max(range(len(widths)), key=lambda index: (widths[index] > least[index], widths[index]))
        if widths[column] <= least[column]:
            break
        widths[column] -= 1
    return widths


def _lines_of(row: Sequence[str], widths: list[int]) -> Iterator[Sequence[str]]:
    """Return the lines of one row, whose cells may be wrapped."""
    cells = (wrapped(cell, size) for cell, size in zip(row, widths, strict=True))
    return zip_longest(*cells, fillvalue="")
