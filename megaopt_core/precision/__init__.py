"""Precision policies: what is stepped, and how states are stored."""

from megaopt_core.precision._main_params import MainParams
from megaopt_core.precision._param_remainders import ParamRemainders
from megaopt_core.precision._policy import BasePrecisionPolicy, Fp32, PrecisionPolicy
from megaopt_core.precision._state_codes import CodedState, Decoder, StoredSlice
from megaopt_core.precision._storage import ParamStorage

__all__ = [
    "BasePrecisionPolicy",
    "CodedState",
    "Decoder",
    "Fp32",
    "MainParams",
    "ParamRemainders",
    "ParamStorage",
    "PrecisionPolicy",
    "StoredSlice",
]
