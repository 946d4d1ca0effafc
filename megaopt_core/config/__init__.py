"""The configuration of a run: the core's fields, plugins' settings, validators, arguments of constructors."""

from megaopt_core.config._assignments import parse_assignments
from megaopt_core.config._constructor import constructor_kwargs
from megaopt_core.config._dtypes import STATE_DTYPES, dtype_name, parse_dtype
from megaopt_core.config._fields import CORE_FIELD_NAMES, CoreFieldInfo, core_field_info
from megaopt_core.config._optimizer_config import OptimizerConfig
from megaopt_core.config._validators import (
    Rule,
    between,
    boolean,
    not_negative,
    one_of,
    positive,
    whole_number,
)

__all__ = [
    "CORE_FIELD_NAMES",
    "STATE_DTYPES",
    "CoreFieldInfo",
    "OptimizerConfig",
    "Rule",
    "between",
    "boolean",
    "constructor_kwargs",
    "core_field_info",
    "dtype_name",
    "not_negative",
    "one_of",
    "parse_assignments",
    "parse_dtype",
    "positive",
    "whole_number",
]
