"""Plain-text tables for reports and the command line."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["format_table"]


def _clip(text: str, width: int) -> str:
    return text if len(text) <= width else text[: max(width - 1, 0)] + "…"


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
        width: largest line; the last column is clipped to keep it. None: no limit.
        right: names of columns that are aligned to the right.

    Example:
        >>> print(format_table(["name", "lr"], [["weight", 0.1], ["b", 0.25]], right=["lr"]))
        name      lr
        ------  ----
        weight   0.1
        b       0.25
    """
    cells = [[str(cell) for cell in row] for row in rows]
    widths = [max(len(line[column]) for line in [list(header), *cells]) for column in range(len(header))]
    if width is not None and widths:
        rest = sum(widths[:-1]) + 2 * (len(widths) - 1)
        widths[-1] = max(min(widths[-1], width - rest), len(header[-1]))

    def line(row: Sequence[str]) -> str:
        shown = [_clip(cell, size) for cell, size in zip(row, widths, strict=True)]
        aligned = [
            cell.rjust(size) if name in right else cell.ljust(size)
            for cell, size, name in zip(shown, widths, header, strict=True)
        ]
        return "  ".join(aligned).rstrip()

    rule = "  ".join("-" * size for size in widths)
    return "\n".join([line(list(header)), rule, *(line(row) for row in cells)])
