"""A report as text: one screen for most readers, or a row for every parameter."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from megaopt_core.reporting._alike import (
    Alike,
    alike,
    numberless,
    shown_count,
    shown_rate,
    table_with_reasons,
)
from megaopt_core.reporting._text_table import fitted_table, format_table, wrapped
from megaopt_core.routing._routing import UNSHARDED

if TYPE_CHECKING:
    from megaopt_core.reporting._report import OptimizerReport, ParamRow

__all__ = ["WIDTH", "full_text", "short_text", "summary_table"]

WIDTH = 100
_MOST_ROWS = 20

_SENT = "sent in last step"


def short_text(report: OptimizerReport, width: int = WIDTH) -> str:
    """Return the report on one screen: optimizers, parameters with repeated layers together, what is wrong.

    Args:
        report: the report.
        width: longest line.
    """
    shared = alike((row.name, _facts(row), row) for row in report.params)
    folded = len(shared) < len(report.params)
    if len(shared) > _MOST_ROWS:
        shared, folded = _by_treatment(report.params), True
    hidden = len(shared) - _MOST_ROWS
    lines = [summary_table(report, width), "", _params_table(shared[:_MOST_ROWS], width)]
    if hidden > 0:
        lines.append(f"... and {hidden} more rows")
    if folded or hidden > 0:
        lines += [
            "",
            *wrapped("a * stands for a number; report(full=True) shows each parameter by itself", width),
        ]
    return "\n".join(lines) + _remarks(report, width)


def full_text(report: OptimizerReport) -> str:
    """Return the report with a row for every parameter and all that is known of it.

    Args:
        report: the report.
    """
    columns = {
        "parameter": [row.name for row in report.params],
        "shape": [shown_count(row.shape, 1) for row in report.params],
        "role": [row.role + ("?" if row.uncertain else "") for row in report.params],
        "optimizer": [row.optimizer for row in report.params],
        "group": [str(row.group) for row in report.params],
        "lr": [f"{row.lr:.6g}" for row in report.params],
        "wd": [f"{row.wd:.6g}" for row in report.params],
        "travels": [f"{row.travels}, {row.bytes:,} B" if row.travels else "" for row in report.params],
        "how": [row.note for row in report.params],
        "owner": [row.owner for row in report.params],
        "place": [row.place for row in report.params],
        "why": [row.reason for row in report.params],
    }
    optional = ("travels", "how", "owner", "place")
    header = [name for name, cells in columns.items() if name not in optional or any(cells)]
    rows = [list(cells) for cells in zip(*(columns[name] for name in header), strict=True)]
    shown = [[cell or "-" for cell in row] for row in rows]
    table = format_table(header, shown, right=["group", "lr", "wd"])
    return f"{table}\n\n{summary_table(report)}{_remarks(report, WIDTH)}"


def summary_table(report: OptimizerReport, width: int | None = None) -> str:
    """Return one table with a row for every optimizer; changes only where they were asked for, strategies that share.

    Args:
        report: the report.
        width: longest line, for which classes and plugins give way; None: no limit.
    """
    shared = any(part.strategy not in ("", UNSHARDED) for part in report.parts)
    changed = f"changed {'on this rank ' if shared else ''}in last step"
    rows = [
        {
            "optimizer": part.optimizer,
            "class": part.optimizer_class + (f" (as {part.same_as})" if part.same_as else ""),
            "from": part.plugin,
            "strategy": part.strategy or None,
            "parameters": f"{part.parameters:,}",
            "elements": f"{part.elements:,}",
            changed: None if part.changed is None else f"{part.changed} of {part.stepped} ({part.method})",
            _SENT: None if part.sent is None else f"{part.sent:,} B in {part.collectives} collectives",
        }
        for part in report.parts
    ]
    header = ["optimizer", "class", "from", *(["strategy"] if shared else []), "parameters", "elements"]
    header += [column for column in (changed, _SENT) if any(row[column] for row in rows)]
    return fitted_table(header, rows, width, optional=["class", "from"], right=["parameters", "elements"])


def _params_table(groups: Sequence[Alike], width: int) -> str:
    """Return the table of parameters, with the reasons that many rows share below it."""
    firsts: list[ParamRow] = [group.members[0] for group in groups]
    rows = [
        [
            group.name,
            _shape(group.members),
            first.optimizer,
            shown_rate(first.lr),
            shown_rate(first.wd),
            first.reason if len(group.members) == 1 else numberless(first.reason),
        ]
        for group, first in zip(groups, firsts, strict=True)
    ]
    header = ["parameter", "shape", "optimizer", "lr", "weight decay", "why"]
    guessed = {index for index, first in enumerate(firsts) if first.uncertain}
    return table_with_reasons(header, rows, width, doubtful=guessed)


def _shape(rows: Sequence[ParamRow]) -> str:
    shapes = {row.shape for row in rows}
    return shown_count(rows[0].shape, len(rows)) if len(shapes) == 1 else f"{len(shapes)} shapes"


def _facts(row: ParamRow) -> tuple[object, ...]:
    return row.shape, row.optimizer, row.lr, row.wd, numberless(row.reason), row.uncertain


def _by_treatment(rows: Iterable[ParamRow]) -> list[Alike]:
    """Return parameters together that are stepped alike for one reason, whatever their names and shapes."""
    groups: dict[tuple[object, ...], list[ParamRow]] = {}
    for row in rows:
        groups.setdefault(_facts(row)[1:], []).append(row)
    return [
        Alike(found[0].name + (f" and {len(found) - 1} more" if len(found) > 1 else ""), tuple(found))
        for found in groups.values()
    ]


def _remarks(report: OptimizerReport, width: int) -> str:
    text = ""
    if report.readers:
        text += f"\n\nroles read by {', '.join(report.readers)}"
    if report.notes:
        text += "\n\n" + "\n".join(
            "\n".join(wrapped(f"{note.name}: {note.text}", width)) for note in report.notes
        )
    if report.unused_settings:
        text += "\n\nsettings that change nothing here:"
        text += "".join(f"\n  {sentence}" for sentence in report.unused_settings)
    for problem in report.problems:
        text += "\n\n" + "\n".join(wrapped(f"PROBLEM: {problem}", width))
    return text
