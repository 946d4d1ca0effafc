"""The settings `lion_*`."""

from __future__ import annotations

from attrs import field, frozen

from megaopt_core.config import between, one_of

__all__ = ["WORTH_A_KERNEL", "WORTH_A_KERNEL_ELSEWHERE", "WORTH_COMPILING", "LionSettings"]

WORTH_COMPILING = 1 << 24
"""Elements from which on the update is compiled by itself: compiling takes seconds."""

WORTH_A_KERNEL = 1 << 14
"""Elements of a tensor on a CPU: a compiled call takes as long as the plain operations on fewer, before it computes."""

WORTH_A_KERNEL_ELSEWHERE = 2
"""The same on another device. For tensors of one element or none torch.compile makes kernels that take nothing else."""


@frozen
class LionSettings:
    """Settings of Lion; a field `x` is `lion_x` on the configuration.

    Args:
        beta1: how much of the momentum goes into the update whose sign is taken.
        beta2: decay rate of the momentum.
        compile: compile the update; None: where that is possible and pays.
    """

    beta1: float = field(
        default=0.95,
        validator=between(0.0, 1.0),
        metadata={"help": "weight of the momentum, against the gradient, in the update whose sign is taken"},
    )
    beta2: float = field(
        default=0.98, validator=between(0.0, 1.0), metadata={"help": "decay rate of the momentum"}
    )
    compile: bool | None = field(
        default=None,
        validator=one_of((None, True, False)),
        metadata={
            "help": "compile the update with torch.compile; None: for large models, if there is a compiler"
        },
    )
