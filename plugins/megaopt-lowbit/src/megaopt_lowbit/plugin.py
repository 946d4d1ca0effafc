"""The plugin: the precision-aware policy, and the decoders of its codes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from megaopt_core import hookimpl
from megaopt_core.precision import BLOCKS, SCALED
from megaopt_lowbit.blocks import decode_blocks
from megaopt_lowbit.policy import ParamRemainders
from megaopt_lowbit.scaled import decode_scaled

if TYPE_CHECKING:
    from megaopt_core import PrecisionPolicy
    from megaopt_core.precision import Decoder

__all__ = ["megaopt_api", "megaopt_precision_policies", "megaopt_state_codes"]

megaopt_api = "1"


@hookimpl
def megaopt_precision_policies() -> Mapping[str, type[PrecisionPolicy]]:
    """Return what `use_precision_aware_optimizer=True` asks for."""
    return {"precision_aware": ParamRemainders}


@hookimpl
def megaopt_state_codes() -> Mapping[str, Decoder]:
    """Return the decoders of fp16 and fp8 states, and of those in 8 bits."""
    return {BLOCKS: decode_blocks, SCALED: decode_scaled}
