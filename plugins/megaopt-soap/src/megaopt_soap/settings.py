"""The settings `soap_*`."""

from __future__ import annotations

from attrs import field, frozen
from attrs.validators import optional

from megaopt_core.config import between, one_of, positive, whole_number

__all__ = ["FIRST_STEPS", "MATMUL_PRECISIONS", "SoapSettings"]

FIRST_STEPS = ("update", "initialize")
MATMUL_PRECISIONS = ("highest", "high", "medium")


@frozen(kw_only=True)
class SoapSettings:
    """What can be set about SOAP beside `adam_beta1`, `adam_beta2` and `adam_eps`; a field `x` is `soap_x`.

    Example:
        >>> SoapSettings(precondition_frequency=10).use_kl_shampoo
        True
    """

    shampoo_beta: float = field(
        default=0.95,
        validator=between(0.0, 1.0),
        metadata={"help": "decay rate of the Kronecker factors, whose eigenvectors are the bases"},
    )
    precondition_frequency: int = field(
        default=1,
        validator=whole_number(1),
        metadata={
            "help": "number of steps from one refresh of the bases to the next, at least 1; 10 is recommended, since "
            "with 1 a batch of fewer rows than the matrix can make a step thousands of times too long"
        },
    )
    use_kl_shampoo: bool = field(
        default=True,
        validator=one_of((True, False)),
        metadata={
            "help": "weight each Kronecker factor's part of a gradient by the inverse of the other factor "
            "(KL-Shampoo)"
        },
    )
    max_precond_dim: int = field(
        default=10_000,
        validator=whole_number(0),
        metadata={
            "help": "largest dimension that gets a basis; a matrix with one larger dimension is rotated on one side "
            "only, one with two is stepped as by Adam"
        },
    )
    orthogonalize: bool = field(
        default=False,
        validator=one_of((True, False)),
        metadata={"help": "orthogonalize every update as Muon does (SOAP-Muon)"},
    )
    extra_scale_factor: float = field(
        default=0.2,
        validator=positive(),
        metadata={
            "help": "factor on an orthogonalized update, beside the root of its larger dimension; 0.2 matches "
            "the size of AdamW's"
        },
    )
    first_step: str = field(
        default="update",
        validator=one_of(FIRST_STEPS),
        metadata={
            "help": "update: the first gradient sets the bases and is applied in them; initialize: it sets the bases "
            "only, as published"
        },
    )
    fp32_matmul_prec: str = field(
        default="high",
        validator=one_of(MATMUL_PRECISIONS),
        metadata={
            "help": "precision of float32 products: highest; high: TF32 if available; medium: bfloat16"
        },
    )
    max_update_rms: float | None = field(
        default=None,
        validator=optional(positive()),
        metadata={
            "help": "largest root mean square of a matrix's update, as a multiple of the learning rate; longer "
            "updates are scaled down to it; None: no bound, and a warning for the first above 10"
        },
    )
