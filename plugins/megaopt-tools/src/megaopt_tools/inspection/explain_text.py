"""What `megaopt explain` prints: the summary, the rows, and the reasons that many rows share."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from megaopt_core.reporting import (
    Alike,
    alike,
    fitted_table,
    name_pattern,
    numberless,
    shown_count,
    shown_rate,
    table_with_reasons,
    wrapped,
)

if TYPE_CHECKING:
    from megaopt_core import Routing

__all__ = ["rows_text", "summary_text"]

_WIDE = 140
"""From this width on every column is shown."""

_FEWEST = 4
"""The first columns of the summary, which stay however narrow the terminal is."""

_MOST_NAMES = 6

type Row = Mapping[str, Any]


def summary_text(rows: Sequence[Row], routing: Routing, width: int | None) -> str:
    """Return what a model would get in a few lines: which optimizers, for how much of it, at which rates.

    Args:
        rows: what `--json` lists.
        routing: the decision.
        width: longest line; None: no limit.
    """
    elements = sum(row["elements"] for row in rows)
    lines = [f"{len(rows):,} parameters, {elements:,} elements"]
    lines += (
        ["", _optimizers(rows, routing, width)]
        if rows
        else ["", "no parameter trains: there is nothing to step"]
    )
    if routing.frozen:
        lines += ["", *_frozen(routing.frozen, width)]
    return "\n".join(lines)


def rows_text(rows: Sequence[Row], width: int | None, *, everything: bool) -> str:
    """Return the table of parameters; below a width of 140 only what most readers look for.

    Args:
        rows: what `--json` lists.
        width: longest line; None: no limit.
        everything: repeated layers do not share a row.

    Returns:
        The table; empty where there is no parameter.
    """
    if not rows:
        return ""
    groups = (
        [Alike(row["name"], (row,)) for row in rows]
        if everything
        else alike((row["name"], _facts(row), row) for row in rows)
    )
    wide = width is None or width >= _WIDE
    cells = [(_wide_cells if wide else _narrow_cells)(group) for group in groups]
    header = list(cells[0])
    if wide and all(len(group.members) == 1 for group in groups):
        header.remove("count")
    shown = [[row[column] for column in header] for row in cells]
    text = table_with_reasons(header, shown, width, right=["count", "group", "wd"])
    if len(groups) < len(rows):
        folded = "a * stands for a number; --all shows each parameter by itself"
        text += "\n\n" + "\n".join(wrapped(folded, width))
    if any(row["uncertain"] for row in rows):
        doubt = (
            "A ? marks a doubtful role: a matrix optimizer leaves the parameter to its fallback. The attribute that "
            "the reason names settles it; so does an example batch."
        )
        text += "\n\n" + "\n".join(wrapped(doubt, width))
    return text


def _narrow_cells(group: Alike) -> dict[str, Any]:
    row = group.members[0]
    return {
        "parameter": group.name,
        "shape": shown_count(row["shape"], len(group.members)),
        "optimizer": row["optimizer"] + (" ?" if row["uncertain"] else ""),
        "lr": shown_rate(row["lr"]),
        "why": row["reason"] if len(group.members) == 1 else numberless(row["reason"]),
    }


def _wide_cells(group: Alike) -> dict[str, Any]:
    row = group.members[0]
    return {
        "parameter": group.name,
        "count": len(group.members),
        "shape": shown_count(row["shape"], 1),
        "role": row["role"] + (" ?" if row["uncertain"] else ""),
        "matrix view": _short_view(row["view"]),
        "optimizer": row["optimizer"],
        "plugin": row["plugin"].partition(" ")[0],
        "group": row["group"],
        "lr": _lr(row),
        "wd": shown_rate(row["weight_decay"]),
        "why": row["reason"] if len(group.members) == 1 else numberless(row["reason"]),
    }


def _facts(row: Row) -> tuple[str, ...]:
    """Return what parameters have in common that share a row."""
    return tuple(numberless(str(value)) for key, value in row.items() if key != "name")


def _short_view(view: str | None) -> str:
    return "-" if view is None else view.removeprefix("MatrixView(").removesuffix(")")


def _lr(row: Row) -> str:
    if row["lr"] is None:
        return "none yet"
    return shown_rate(row["lr"]) + (" (default)" if row["lr_is_default"] else "")


def _optimizers(rows: Sequence[Row], routing: Routing, width: int | None) -> str:
    """Return a row for every optimizer, with as many columns as there is room for."""
    shown = []
    for child in routing.children:
        mine = [row for row in rows if row["group"] in child.groups]
        settings = ", ".join(f"{key}={value!r}" for key, value in child.settings.items())
        shown.append(
            {
                "optimizer": child.optimizer + (" (experts)" if child.is_expert else ""),
                "parameters": f"{len(mine):,}",
                "elements": f"{sum(row['elements'] for row in mine):,}",
                "lr": _all_of(_lr(row) for row in mine),
                "weight decay": _all_of(shown_rate(row["weight_decay"]) for row in mine),
                "sharding": child.strategy,
                "plugin": mine[0]["plugin"] if mine else "-",
                **({"settings of its own": settings} if settings else {}),
            }
        )
    header = list(dict.fromkeys(column for row in shown for column in row))
    return fitted_table(
        header, shown, width, optional=header[: _FEWEST - 1 : -1], right=["parameters", "elements"]
    )


def _all_of(values: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(values)) or "-"


def _frozen(names: Sequence[str], width: int | None) -> list[str]:
    patterns = list(dict.fromkeys(name_pattern(name) for name in names))
    more = f" and {len(patterns) - _MOST_NAMES} more" if len(patterns) > _MOST_NAMES else ""
    listed = ", ".join(patterns[:_MOST_NAMES] if len(names) > _MOST_NAMES else names)
    what = "1 parameter does" if len(names) == 1 else f"{len(names):,} parameters do"
    return wrapped(f"{what} not train: {listed}{more}", width)
