"""The matrices inside a stored tensor, as windows that can be read and written without a copy."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from attrs import frozen

from megaopt_core.errors import ViewError

if TYPE_CHECKING:
    from megaopt_core.params._views import MatrixView

__all__ = ["MatrixWindow", "windows_of"]


@frozen
class MatrixWindow:
    """One matrix (or one batch of matrices) of a stored tensor, as `MatrixView.windows` gives it.

    Args:
        shape: `[*batch, rows, columns]` of the matrix.
        dim: dimension that is split; None when the window is everything.
        groups: how often the pattern of matrices repeats along `dim`.
        total: length of the pattern.
        offset: where this matrix begins in the pattern.
        transposed: the matrix is stored `[columns, rows]`.
        batch_dims: number of leading dimensions that count matrices.
        rest: the stored dimensions after those that make the first of a matrix.
        has_heads: the last of the batch dimensions counts heads, blocks of rows.
        is_across: heads are blocks of columns.
        first_dims: how many stored dimensions make the first of a matrix together.

    Example:
        >>> import torch
        >>> from megaopt_core.params import MatrixView
        >>> q, k, v = MatrixView(split_sizes=(4, 2, 2)).windows((16, 8))
        >>> stored = torch.arange(128.0).view(16, 8)
        >>> torch.equal(q.read(stored)[4], stored[8])
        True
    """

    shape: tuple[int, ...]
    dim: int | None
    groups: int
    total: int
    offset: int
    transposed: bool
    batch_dims: int
    rest: tuple[int, ...]
    has_heads: bool = False
    is_across: bool = False
    first_dims: int = 1

    @property
    def size(self) -> int:
        """Length of the matrix along the split dimension, in one repetition of the pattern."""
        assert self.dim is not None  # noqa: S101 - only asked where something is split
        return self._stored_lengths()[self.dim - self.batch_dims] // self.groups

    def _stored_lengths(self) -> tuple[int, int]:
        rows, columns = self.shape[-2:]
        if self.is_across:
            columns *= self.shape[-3]
        elif self.has_heads:
            rows *= self.shape[-3]
        return (columns, rows) if self.transposed else (rows, columns)

    def window(self, stored: torch.Tensor) -> torch.Tensor:
        """Return the part of a stored tensor that holds this matrix: always a view.

        Args:
            stored: the parameter, or a tensor of its shape.

        Raises:
            ViewError: several dimensions make one of the matrix together, and the tensor is not contiguous.
        """
        if self._splits_flattened or self.first_dims > 1:
            if not stored.is_contiguous():
                raise ViewError(
                    f"dimensions of a tensor of shape {tuple(stored.shape)} and strides {stored.stride()} cannot be "
                    "made one in place; the tensor must be contiguous"
                )
            stored = self._joined(stored)
        return self._narrowed(stored)

    def _joined(self, stored: torch.Tensor) -> torch.Tensor:
        end = self.batch_dims + self.first_dims
        if self._splits_flattened:
            stored = stored.flatten(end)
        return stored.flatten(self.batch_dims, end - 1) if self.first_dims > 1 else stored

    @property
    def _splits_flattened(self) -> bool:
        return self.dim is not None and self.dim > self.batch_dims and len(self.rest) > 1

    def _narrowed(self, stored: torch.Tensor) -> torch.Tensor:
        if self.dim is None:
            return stored
        if self.groups == 1:
            return stored.narrow(self.dim, self.offset, self.size)
        grouped: torch.Tensor = torch.unflatten(stored, self.dim, (self.groups, self.total))
        return grouped.narrow(self.dim + 1, self.offset, self.size)

    def fold(self, matrix: torch.Tensor) -> torch.Tensor:
        """Return a matrix in the shape of :meth:`window`: a view, but for heads whose strides do not allow one.

        Args:
            matrix: `[*batch, rows, columns]`.
        """
        folded = matrix
        if self.has_heads:
            folded = matrix.movedim(-3, -2).flatten(-2) if self.is_across else matrix.flatten(-3, -2)
        folded = folded.mT if self.transposed else folded
        if len(self.rest) > 1 and not self._splits_flattened:
            folded = folded.unflatten(-1, self.rest)
        if self.dim is not None and self.groups > 1:
            folded = folded.unflatten(self.dim, (self.groups, self.size))
        return folded

    def read(self, stored: torch.Tensor) -> torch.Tensor:
        """Return the matrix; a view where strides allow.

        Args:
            stored: the parameter, or a tensor of its shape.
        """
        window = self._narrowed(self._joined(stored))
        if self.dim is None and not self.transposed and len(self.rest) == 1 and not self.has_heads:
            return window
        batch, lengths = tuple(window.shape[: self.batch_dims]), self._stored_lengths()
        matrix = window.reshape(*batch, *lengths)
        matrix = matrix.mT if self.transposed else matrix
        if self.is_across:
            heads: torch.Tensor = matrix.unflatten(-1, (self.shape[-3], self.shape[-1]))
            return heads.movedim(-2, -3)
        return matrix.unflatten(-2, self.shape[-3:-1]) if self.has_heads else matrix


def windows_of(view: MatrixView, shape: Sequence[int], *, by_head: bool) -> tuple[MatrixWindow, ...]:
    """Return the matrices of a stored tensor, one for each piece of its view.

    Args:
        view: how the tensor is seen.
        shape: its stored shape.
        by_head: give each attention head a matrix of its own, where the view knows heads.

    Raises:
        ViewError: the view does not fit the shape.
    """
    batch, rows, columns = view.logical_shape(shape)
    heads_across = view.head_columns if by_head else 0
    head_sizes = view.head_sizes if by_head else ()
    window = partial(
        MatrixWindow,
        transposed=view.transposed,
        batch_dims=view.batch_dims,
        rest=tuple(shape[view.batch_dims + view.first_dims :]),
        first_dims=view.first_dims,
        has_heads=bool(head_sizes or heads_across),
        is_across=bool(heads_across),
    )
    if heads_across:
        if columns % heads_across:
            raise ViewError(f"{view}: {columns} columns are no multiple of the {heads_across} of a head")
        heads = (*batch, columns // heads_across, rows, heads_across)
        return (window(heads, None, 1, 0, 0),)
    if not view.split_sizes:
        matrix = _by_head((*batch, rows, columns), head_sizes[0] if head_sizes else 0, view)
        return (window(matrix, None, 1, 0, 0),)
    total = sum(view.split_sizes)
    groups = (rows, columns)[view.split_dim] // total
    dim = view.batch_dims + (0 if (view.split_dim == 0) != view.transposed else 1)
    offset, found = 0, []
    for size, head in zip(view.split_sizes, head_sizes or (0,) * len(view.split_sizes), strict=True):
        matrix = (*batch, groups * size, columns) if view.split_dim == 0 else (*batch, rows, groups * size)
        matrix = _by_head(matrix, head, view)
        found.append(window(matrix, dim, groups, total, offset))
        offset += size
    return tuple(found)


def _by_head(shape: tuple[int, ...], head: int, view: MatrixView) -> tuple[int, ...]:
    """Return `[*batch, heads, rows of a head, columns]`, or the shape as it is where there are no heads."""
    *batch, rows, columns = shape
    if not head:
        return shape
    if rows % head:
        raise ViewError(f"{view}: {rows} rows are no multiple of the {head} of a head")
    return (*batch, rows // head, head, columns)
