"""Second moments that adaptive Muon keeps of what it applies."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from functools import cache
from types import MappingProxyType
from typing import TYPE_CHECKING, get_args, override

import torch
import torch.distributed as dist

from megaopt_core.errors import ConfigurationError
from megaopt_muon.products.precision import at_least_float32

if TYPE_CHECKING:
    from megaopt_muon.pieces.plans import MatrixPlan

__all__ = ["MOMENTS", "Moment", "get_supported_moment2_methods", "validate_moment2_method"]


@cache
def get_supported_moment2_methods() -> tuple[str, ...]:
    """Return the second-moment methods that the installed emerging-optimizers names and that are implemented here.

    Example:
        >>> get_supported_moment2_methods()
        ('adamuon', 'normuon', 'namo')
    """
    from emerging_optimizers.orthogonalized_optimizers.adaptive_muon import Moment2MethodT

    return tuple(name for name in get_args(Moment2MethodT) if name in MOMENTS)


def validate_moment2_method(method: str) -> None:
    """Raise unless there is a second-moment method of this name.

    Args:
        method: the name.

    Raises:
        ConfigurationError: there is none (a `ValueError`).
    """
    if method not in get_supported_moment2_methods():
        raise ConfigurationError.of(
            "moment2_method",
            method,
            f"must be one of {', '.join(map(repr, get_supported_moment2_methods()))}",
        )


class Moment(ABC):
    """A second moment: the shape of its state, and what it makes of an orthogonalized update.

    Sums over a parameter run over all ranks that hold a part of it, so that the result does not depend on how tensor
    parallelism cuts it.
    """

    @abstractmethod
    def state_shape(self, plan: MatrixPlan) -> tuple[int, ...]:
        """Return the shape of the state of one parameter.

        Args:
            plan: what the parameter consists of.
        """

    def state_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype of the state of a parameter.

        Args:
            dtype: of the parameter.
        """
        return at_least_float32(dtype)

    @abstractmethod
    def normalize(
        self,
        o: torch.Tensor,
        state: torch.Tensor,
        plan: MatrixPlan,
        *,
        grad: torch.Tensor,
        update: torch.Tensor,
        beta2: float,
        eps: float,
    ) -> torch.Tensor:
        """Update the state and return the normalized update.

        Args:
            o: orthogonalized and unscaled, of the parameter's stored shape, float32 or wider.
            state: the second moment, of the dtype of :meth:`state_dtype`, updated in place.
            plan: what the parameter consists of.
            grad: the gradient.
            update: what was orthogonalized.
            beta2: decay rate.
            eps: keeps divisions finite.
        """


class ElementMoment(Moment):
    r"""AdaMuon: :math:`v \leftarrow \beta_2 v + (1 - \beta_2) o^2`, update :math:`o / (\sqrt v + \epsilon)`.

    Source:
        Si et al., "AdaMuon: Adaptive Muon Optimizer" (arXiv:2507.11005).
    """

    @override
    def state_shape(self, plan: MatrixPlan) -> tuple[int, ...]:
        return plan.shape

    @override
    def normalize(
        self,
        o: torch.Tensor,
        state: torch.Tensor,
        plan: MatrixPlan,
        *,
        grad: torch.Tensor,
        update: torch.Tensor,
        beta2: float,
        eps: float,
    ) -> torch.Tensor:
        state.mul_(beta2).addcmul_(o, o, value=1.0 - beta2)
        root = state.sqrt().add_(eps)
        return torch.div(o, root, out=root)


class RowMoment(Moment):
    r"""NorMuon: one value a row, or a column of wide matrices.

    With :math:`\bar o` the mean of :math:`o^2` over the columns of a matrix that has at least as many rows, else over
    its rows: :math:`v \leftarrow \beta_2 v + (1 - \beta_2) \bar o`, update :math:`o / \sqrt{\max(v, \epsilon)}`,
    rescaled to the Frobenius norm of :math:`o`. The matrix is the parameter's whole logical one, also when it is fused.

    Source:
        Li et al., "NorMuon: Making Muon more efficient and scalable" (arXiv:2510.05491).
    """

    @override
    def state_shape(self, plan: MatrixPlan) -> tuple[int, ...]:
        batch, rows, columns = plan.logical_shape
        return (*batch, rows, 1) if self._mean_dim(plan) == 1 else (*batch, 1, columns)

    @override
    def normalize(
        self,
        o: torch.Tensor,
        state: torch.Tensor,
        plan: MatrixPlan,
        *,
        grad: torch.Tensor,
        update: torch.Tensor,
        beta2: float,
        eps: float,
    ) -> torch.Tensor:
        view, dim = plan.view, self._mean_dim(plan)
        matrix = view.flattened(o)
        matrix = matrix.mT if view.transposed else matrix
        squares = matrix.square().sum(dim=dim - 2, keepdim=True)
        if plan.cut is not None and plan.cut.dim == dim:
            dist.all_reduce(squares, group=plan.cut.group)
        state.lerp_(squares / _logical_lengths(plan)[dim], 1.0 - beta2)
        before = _frobenius(matrix, plan)
        matrix = matrix * state.clamp_min(eps).rsqrt_()
        matrix.mul_(before / _frobenius(matrix, plan).clamp_min(eps))
        return (matrix.mT if view.transposed else matrix).reshape(o.shape)

    def _mean_dim(self, plan: MatrixPlan) -> int:
        rows, columns = _logical_lengths(plan)
        return 1 if rows >= columns else 0


class MatrixMoment(Moment):
    r"""NAMO: one value a matrix, :math:`v \leftarrow \beta_2 v + (1-\beta_2) \lVert g \rVert_F^2`.

    The update is :math:`o \, \lVert u \rVert_F / (\sqrt v + \epsilon)` for what was orthogonalized, `u`. Here
    :math:`\epsilon` is compared with gradients, not with orthogonalized updates as in the other methods.

    Source:
        "NAMO" (arXiv:2602.17080).
    """

    @override
    def state_shape(self, plan: MatrixPlan) -> tuple[int, ...]:
        batch, _, _ = plan.logical_shape
        return (*batch, 1, 1) if batch else (1,)

    @override
    def state_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return torch.float64  # squares of norms leave the range of float32 where norms do not

    @override
    def normalize(
        self,
        o: torch.Tensor,
        state: torch.Tensor,
        plan: MatrixPlan,
        *,
        grad: torch.Tensor,
        update: torch.Tensor,
        beta2: float,
        eps: float,
    ) -> torch.Tensor:
        flat = plan.view.flattened
        norm = _frobenius(flat(grad), plan, torch.float64)
        state.lerp_(norm.square().view(state.shape), 1.0 - beta2)
        alpha = _frobenius(flat(update), plan, torch.float64).view(state.shape) / (state.sqrt() + eps)
        lengths = (*alpha.shape[: plan.view.batch_dims], *[1] * (o.dim() - plan.view.batch_dims))
        return o * alpha.view(lengths).to(o.dtype)


MOMENTS: Mapping[str, Moment] = MappingProxyType(
    {
        "adamuon": ElementMoment(),
        "normuon": RowMoment(),
        "namo": MatrixMoment(),
    }
)
"""Second moments by the name of their method."""


def _logical_lengths(plan: MatrixPlan) -> tuple[int, int]:
    """Return rows and columns of the whole logical matrix."""
    _, rows, columns = plan.whole_logical_shape
    return rows, columns


def _frobenius(matrix: torch.Tensor, plan: MatrixPlan, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return the Frobenius norm of every whole matrix, `[*batch, 1, 1]`, in a dtype or wider."""
    wide = torch.promote_types(matrix.dtype, dtype)
    norm: torch.Tensor = torch.linalg.vector_norm(matrix, dim=(-2, -1), keepdim=True, dtype=wide)
    if plan.cut is None:
        return norm
    squares = norm.double().square_()
    dist.all_reduce(squares, group=plan.cut.group)
    return squares.sqrt_().to(norm.dtype)
