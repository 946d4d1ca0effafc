"""What was built and whether it moved: reports, proof of change, tables.

Public names are imported when they are first used: a table needs no torch.
"""

from typing import TYPE_CHECKING

from megaopt_core import resolve_lazily

if TYPE_CHECKING:
    from megaopt_core.reporting._alike import (
        Alike,
        alike,
        name_pattern,
        numberless,
        shown_count,
        shown_rate,
        table_with_reasons,
    )
    from megaopt_core.reporting._changes import Samples, Values, any_differ, differing_owners, spread
    from megaopt_core.reporting._report import OptimizerReport, ParamRow, PartRow
    from megaopt_core.reporting._text_table import fitted_table, format_table, wrapped
    from megaopt_core.reporting._unused_settings import settings_without_effect
    from megaopt_core.reporting._watched_model import NamedChunk, WatchedModel

__all__ = [
    "Alike",
    "NamedChunk",
    "OptimizerReport",
    "ParamRow",
    "PartRow",
    "Samples",
    "Values",
    "WatchedModel",
    "alike",
    "any_differ",
    "differing_owners",
    "fitted_table",
    "format_table",
    "name_pattern",
    "numberless",
    "settings_without_effect",
    "shown_count",
    "shown_rate",
    "spread",
    "table_with_reasons",
    "wrapped",
]

_HOME = {
    "Alike": "_alike",
    "NamedChunk": "_watched_model",
    "OptimizerReport": "_report",
    "ParamRow": "_report",
    "PartRow": "_report",
    "Samples": "_changes",
    "Values": "_changes",
    "WatchedModel": "_watched_model",
    "alike": "_alike",
    "any_differ": "_changes",
    "differing_owners": "_changes",
    "fitted_table": "_text_table",
    "format_table": "_text_table",
    "name_pattern": "_alike",
    "numberless": "_alike",
    "settings_without_effect": "_unused_settings",
    "shown_count": "_alike",
    "shown_rate": "_alike",
    "spread": "_changes",
    "table_with_reasons": "_alike",
    "wrapped": "_text_table",
}

if not TYPE_CHECKING:
    __getattr__, __dir__ = resolve_lazily(__name__, _HOME)
