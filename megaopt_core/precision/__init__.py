"""Precision policies: what is stepped, and how states are stored."""

from typing import TYPE_CHECKING

from megaopt_core import resolve_lazily

if TYPE_CHECKING:
    from megaopt_core.precision._base_policy import BasePrecisionPolicy
    from megaopt_core.precision._fp32 import Fp32
    from megaopt_core.precision._main_params import MainParams
    from megaopt_core.precision._param_remainders import ParamRemainders
    from megaopt_core.precision._policy import PrecisionPolicy
    from megaopt_core.precision._state_codes import CodedState, StoredSlice
else:
    __getattr__, __dir__ = resolve_lazily(
        __name__,
        {
            "BasePrecisionPolicy": "_base_policy",
            "CodedState": "_state_codes",
            "Fp32": "_fp32",
            "MainParams": "_main_params",
            "ParamRemainders": "_param_remainders",
            "PrecisionPolicy": "_policy",
            "StoredSlice": "_state_codes",
        },
    )

__all__ = [
    "BasePrecisionPolicy",
    "CodedState",
    "Fp32",
    "MainParams",
    "ParamRemainders",
    "PrecisionPolicy",
    "StoredSlice",
]
