"""What was built and whether it moved: reports, proof of change, tables."""

from megaopt_core.reporting._optimizer_report import OptimizerReport
from megaopt_core.reporting._text_table import format_table

__all__ = ["OptimizerReport", "format_table"]
