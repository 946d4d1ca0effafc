"""Transforms of parameters after a step: projections, clipping of weights, normalization."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

    from megaopt_core.params._shards import Shard
    from megaopt_core.params._specs import Granularity
    from megaopt_core.params._views import MatrixView

__all__ = ["AfterStep", "NamedPiece"]


class NamedPiece(Protocol):
    """Elements of a parameter that this rank steps; a write changes main value, remainder and model together."""

    @property
    def name(self) -> str:
        """The parameter's canonical name."""

    @property
    def shard(self) -> Shard:
        """The elements of the parameter that these are."""

    @property
    def view(self) -> MatrixView | None:
        """The matrices that the parameter is seen as; None: not as any."""

    @property
    def value(self) -> torch.Tensor:
        """The main values, in fp32 or wider, to read: of the box's shape where these are all of a box, else flat."""

    def copy_(self, values: torch.Tensor) -> None:
        """Write values.

        Args:
            values: as many as :attr:`value` has, in its order.
        """

    def scale_(self, factor: float | torch.Tensor) -> None:
        """Multiply all values.

        Args:
            factor: a number, or a tensor of one element.
        """

    def scale_rows(self, factors: torch.Tensor) -> None:
        """Multiply each value by the factor of its row.

        Args:
            factors: one for each row (first dimension) of the whole parameter.
        """


class AfterStep(Protocol):
    """Writes to parameters after all inner optimizers have stepped, before parameters are brought to other ranks.

    Attributes:
        granularity: `Granularity.ELEMENT`: it is given any elements of any parameter. `Granularity.TENSOR`: it is given
            whole parameters; the build refuses it where a hidden matrix is cut over ranks, and other parameters that
            are cut are left out.
    """

    granularity: Granularity

    def __call__(self, pieces: Sequence[NamedPiece]) -> None:
        """Write. It must not communicate.

        Args:
            pieces: what this rank steps, in the order of the optimizer's parts; it may be empty.
        """
