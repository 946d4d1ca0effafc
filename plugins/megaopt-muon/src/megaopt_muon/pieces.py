"""The matrices inside a stored parameter, as windows that can be read and written without a copy."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from attrs import frozen

from megaopt_core.errors import ViewError
from megaopt_core.params import MatrixView

__all__ = ["Piece", "pieces_of"]


@frozen
class Piece:
    """One matrix (or one batch of matrices) of a stored parameter.

    Args:
        shape: `[*batch, rows, columns]` of the matrix.
        dim: stored dimension that is split; None when the piece is everything.
        groups: how often the pattern of pieces repeats along `dim`.
        total: length of the pattern.
        offset: where this piece begins in the pattern.
        transposed: the matrix is stored `[columns, rows]`.
        batch_dims: number of leading dimensions that count matrices.
        rest: the stored dimensions after the first that is not batch.
        has_heads: the last of the batch dimensions counts heads, blocks of rows.
        is_across: heads are blocks of columns.

    Example:
        >>> q, k, v = pieces_of(MatrixView(split_sizes=(4, 2, 2)), (16, 8))
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

    @property
    def size(self) -> int:
        """Length of the piece along the split dimension, in one repetition of the pattern."""
        assert self.dim is not None  # noqa: S101 - only asked of split pieces
        return self._stored_lengths()[self.dim - self.batch_dims] // self.groups

    def _stored_lengths(self) -> tuple[int, int]:
        rows, columns = self.shape[-2:]
        if self.is_across:
            columns *= self.shape[-3]
        elif self.has_heads:
            rows *= self.shape[-3]
        return (columns, rows) if self.transposed else (rows, columns)

    def window(self, stored: torch.Tensor) -> torch.Tensor:
        """Return the part of a stored tensor that this piece covers: always a view.

        Args:
            stored: the parameter, or a tensor of its shape.
        """
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
        if len(self.rest) > 1:
            folded = folded.unflatten(-1, self.rest)
        if self.dim is not None and self.groups > 1:
            folded = folded.unflatten(self.dim, (self.groups, self.size))
        return folded

    def read(self, stored: torch.Tensor) -> torch.Tensor:
        """Return the matrix; a view where strides allow.

        Args:
            stored: the parameter, or a tensor of its shape.
        """
        window = self.window(stored)
        if self.dim is None and not self.transposed and len(self.rest) == 1 and not self.has_heads:
            return window
        batch, lengths = tuple(window.shape[: self.batch_dims]), self._stored_lengths()
        matrix = window.reshape(*batch, *lengths)
        matrix = matrix.mT if self.transposed else matrix
        if self.is_across:
            heads: torch.Tensor = matrix.unflatten(-1, (self.shape[-3], self.shape[-1]))
            return heads.movedim(-2, -3)
        return matrix.unflatten(-2, self.shape[-3:-1]) if self.has_heads else matrix


def pieces_of(view: MatrixView, shape: Sequence[int]) -> tuple[Piece, ...]:
    """Return the matrices of a stored parameter.

    Args:
        view: how the parameter is seen.
        shape: its stored shape.

    Raises:
        ViewError: the view does not fit the shape, or splits a dimension that is flattened from several.

    Example:
        >>> [piece.shape for piece in pieces_of(MatrixView(split_sizes=(4, 2), head_sizes=(2, 2)), (12, 8))]
        [(4, 2, 8), (2, 2, 8)]
    """
    batch, rows, columns = view.logical_shape(shape)
    rest = tuple(shape[view.batch_dims + 1 :])
    common = {
        "transposed": view.transposed,
        "batch_dims": view.batch_dims,
        "rest": rest,
        "has_heads": bool(view.head_sizes or view.head_columns),
        "is_across": bool(view.head_columns),
    }
    if view.head_columns:
        if columns % view.head_columns:
            raise ViewError(f"{view}: {columns} columns are no multiple of the {view.head_columns} of a head")
        heads = (*batch, columns // view.head_columns, rows, view.head_columns)
        return (Piece(heads, None, 1, 0, 0, **common),)  # type: ignore[arg-type]
    if not view.split_sizes:
        whole = _by_head((*batch, rows, columns), view.head_sizes[0] if view.head_sizes else 0, view)
        return (Piece(whole, None, 1, 0, 0, **common),)  # type: ignore[arg-type]
    on_first = (view.split_dim == 0) != view.transposed
    if not on_first and len(rest) > 1:
        raise ViewError(
            f"{view}: splits a dimension that is flattened from {rest} of a parameter of shape {tuple(shape)}"
        )
    total = sum(view.split_sizes)
    groups = (rows, columns)[view.split_dim] // total
    offsets = [sum(view.split_sizes[:index]) for index in range(len(view.split_sizes))]
    dim = view.batch_dims + (0 if on_first else 1)
    sizes = view.head_sizes or (0,) * len(view.split_sizes)
    return tuple(
        Piece(_by_head(piece_shape, head, view), dim, groups, total, offset, **common)  # type: ignore[arg-type]
        for piece_shape, head, offset in zip(view.matrix_shapes(shape), sizes, offsets, strict=True)
    )


def _by_head(shape: tuple[int, ...], head: int, view: MatrixView) -> tuple[int, ...]:
    """Return `[*batch, heads, rows of a head, columns]`, or the shape as it is where there are no heads."""
    *batch, rows, columns = shape
    if not head:
        return shape
    if rows % head:
        raise ViewError(f"{view}: {rows} rows are no multiple of the {head} of a head")
    return (*batch, rows // head, head, columns)
