"""What a step returns."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple, cast, override

if TYPE_CHECKING:
    from megaopt_core.optimizers._step.stats import StepStats

__all__ = ["StepResult", "UnreadStepResult"]


class StepResult(NamedTuple):
    """The outcome of one step.

    Args:
        update_successful: False when the step was skipped because a gradient was not finite.
        grad_norm: L2 norm over all parameters before clipping; None where it was not computed.
        num_zeros_in_grad: number of zero elements; None where they were not counted.
    """

    update_successful: bool
    grad_norm: float | None
    num_zeros_in_grad: int | None


class UnreadStepResult(StepResult):
    """The outcome of a step on a device, which the host reads when somebody looks at it.

    Unpacking, comparing and printing look at all of it.
    """

    _stats: StepStats

    @classmethod
    def of(cls, stats: StepStats, norm: float | None, zeros: int | None) -> UnreadStepResult:
        """Return the outcome.

        Args:
            stats: what was measured.
            norm: what stands for the norm where it was not.
            zeros: what stands for the zeros where they were not.
        """
        made = cls(update_successful=True, grad_norm=norm, num_zeros_in_grad=zeros)
        made._stats = stats
        return made

    @property
    @override
    def update_successful(self) -> bool:
        return not self._stats.is_stopped

    @property
    @override
    def grad_norm(self) -> float | None:
        return None if self._found_inf else self._stats.norm(super().__getitem__(1))

    @property
    @override
    def num_zeros_in_grad(self) -> int | None:
        return None if self._found_inf else self._stats.zeros(cast("int | None", super().__getitem__(2)))

    @property
    def _found_inf(self) -> bool:
        return self._stats.noop is not None and self._stats.found_inf

    def _read(self) -> StepResult:
        return StepResult(self.update_successful, self.grad_norm, self.num_zeros_in_grad)

    @override
    def __iter__(self) -> Iterator[Any]:
        return iter(self._read())

    @override
    def __getitem__(self, index: Any) -> Any:
        return self.update_successful if index == 0 else self._read()[index]

    @override
    def __eq__(self, other: object) -> bool:
        return self._read() == other

    @override
    def __ne__(self, other: object) -> bool:
        return self._read() != other

    @override
    def __hash__(self) -> int:
        return hash(self._read())

    @override
    def __repr__(self) -> str:
        return repr(self._read())

    @override
    def _replace(self, **values: Any) -> StepResult:  # type: ignore[override]
        return self._read()._replace(**values)

    @override
    def __reduce__(self) -> Any:
        return StepResult, tuple(self._read())
