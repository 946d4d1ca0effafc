"""The configuration of a run: the core's fields, plugins' settings, the run file, validators."""

from typing import TYPE_CHECKING

from megaopt_core import resolve_lazily

if TYPE_CHECKING:
    from megaopt_core.config._field_kinds import STATE_DTYPES, dtype_name, parse_dtype
    from megaopt_core.config._fields import CORE_FIELD_NAMES, core_field_info
    from megaopt_core.config._optimizer_config import OptimizerConfig
    from megaopt_core.config._run_file import OverridesFromFile, RunFile
    from megaopt_core.config._validators import between, not_negative, one_of, positive, whole_number
else:
    __getattr__, __dir__ = resolve_lazily(
        __name__,
        {
            "CORE_FIELD_NAMES": "_fields",
            "OptimizerConfig": "_optimizer_config",
            "OverridesFromFile": "_run_file",
            "RunFile": "_run_file",
            "STATE_DTYPES": "_field_kinds",
            "between": "_validators",
            "core_field_info": "_fields",
            "dtype_name": "_field_kinds",
            "not_negative": "_validators",
            "one_of": "_validators",
            "parse_dtype": "_field_kinds",
            "positive": "_validators",
            "whole_number": "_validators",
        },
    )

__all__ = [
    "CORE_FIELD_NAMES",
    "STATE_DTYPES",
    "OptimizerConfig",
    "OverridesFromFile",
    "RunFile",
    "between",
    "core_field_info",
    "dtype_name",
    "not_negative",
    "one_of",
    "parse_dtype",
    "positive",
    "whole_number",
]
