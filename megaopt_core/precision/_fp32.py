"""The policy of full precision: parameters are stepped where they are."""

from __future__ import annotations

from megaopt_core.precision._base_policy import BasePrecisionPolicy

__all__ = ["Fp32"]


class Fp32(BasePrecisionPolicy):
    """Parameters are stepped in place, in their own dtype."""
