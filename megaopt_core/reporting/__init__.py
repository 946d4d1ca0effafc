"""What was built and whether it moved: reports, proof of change, tables.

Public names are imported when they are first used: a table needs no torch.
"""

from typing import TYPE_CHECKING

from megaopt_core import resolve_lazily

if TYPE_CHECKING:
    from megaopt_core.reporting._report import OptimizerReport, ParamRow, PartRow
    from megaopt_core.reporting._text_table import format_table

__all__ = ["OptimizerReport", "ParamRow", "PartRow", "format_table"]

_HOME = {
    "PartRow": "_report",
    "ParamRow": "_report",
    "OptimizerReport": "_report",
    "format_table": "_text_table",
}

if not TYPE_CHECKING:
    __getattr__, __dir__ = resolve_lazily(__name__, _HOME)
