"""The settings `adam_*` and `sgd_*`."""

from __future__ import annotations

import torch
from attrs import field, frozen

from megaopt_core.config import STATE_DTYPES, between, one_of, parse_dtype, positive

__all__ = ["AdamSettings", "SGDSettings"]


@frozen
class AdamSettings:
    """Settings of Adam and AdamW.

    Args:
        beta1: decay rate of the gradient's running average.
        beta2: decay rate of the squared gradient's running average.
        eps: added to the denominator.
    """

    beta1: float = field(
        default=0.9,
        validator=between(0.0, 1.0),
        metadata={"help": "decay rate of the gradient's running average"},
    )
    beta2: float = field(
        default=0.999,
        validator=between(0.0, 1.0),
        metadata={"help": "decay rate of the squared gradient's running average"},
    )
    eps: float = field(default=1e-8, validator=positive(), metadata={"help": "added to the denominator"})


@frozen
class SGDSettings:
    """Settings of SGD.

    Args:
        momentum: factor on the momentum buffer; 0 means none.
        momentum_dtype: in which the momentum buffer is kept (precision-aware optimizer).
    """

    momentum: float = field(
        default=0.9, validator=between(0.0, 1.0), metadata={"help": "factor on the momentum buffer"}
    )
    momentum_dtype: torch.dtype = field(
        default=torch.float32,
        converter=parse_dtype,
        validator=one_of(STATE_DTYPES),
        metadata={"help": "dtype in which the momentum buffer is kept (precision-aware optimizer)"},
    )
