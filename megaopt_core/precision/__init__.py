"""Precision policies: what is stepped, and how states are stored."""

from megaopt_core.precision._main_params import MainParams
from megaopt_core.precision._policy import MAIN_PARAM, Fp32, PrecisionPolicy
from megaopt_core.precision._state_codes import (
    BLOCK,
    BLOCKS,
    SCALED,
    CodedState,
    Decoder,
    StoredSlice,
    block_magnitudes,
    decode_slices,
    scale_key,
)
from megaopt_core.precision._storage import LOW_PRECISION, ParamStorage, SeparateMain
from megaopt_core.precision._stored import REMAINDER, Stored, StoredTensor

__all__ = [
    "BLOCK",
    "BLOCKS",
    "LOW_PRECISION",
    "MAIN_PARAM",
    "REMAINDER",
    "SCALED",
    "CodedState",
    "Decoder",
    "Fp32",
    "MainParams",
    "ParamStorage",
    "PrecisionPolicy",
    "SeparateMain",
    "Stored",
    "StoredSlice",
    "StoredTensor",
    "block_magnitudes",
    "decode_slices",
    "scale_key",
]
