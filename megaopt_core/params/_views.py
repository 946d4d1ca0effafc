"""How one stored parameter is seen as matrices."""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import StrEnum
from typing import Any

import torch
from attrs import Attribute, astuple, evolve, field, frozen

from megaopt_core.errors import ViewError
from megaopt_core.params._windows import MatrixWindow, windows_of

__all__ = ["MATRIX", "Fused", "MatrixView"]


def _sizes(value: Sequence[int]) -> tuple[int, ...]:
    return tuple(int(size) for size in value)


class Fused(StrEnum):
    """What the pieces of a fused weight are.

    `NOTHING`: there is one piece, or nobody knows what they are. `QKV`: query, key and value of attention, also with an
    output gate. `GATE_UP`: the two projections of a gated MLP.
    """

    NOTHING = ""
    QKV = "qkv"
    GATE_UP = "gate_up"


def _is_kept_by_parts(attribute: Attribute[Any], _: object) -> bool:
    return attribute.name not in {"label", "split_sizes"}


@frozen
class MatrixView:
    """Describes the matrices inside one stored tensor: batched, transposed, split.

    Read from the outside in: the first `batch_dims` dimensions count independent matrices (experts). What remains
    is flattened after its first dimension, so that a convolution `[out, in, k, k]` is `[out, in*k*k]`, or after its
    first `first_dims`, which are then flattened too; `transposed` says that it is stored `[in, out]`. The logical
    matrix `[rows, columns] = [out, in]` is then split along `split_dim` into pieces of `split_sizes`. When the sizes
    add up to less than the dimension they repeat: the dimension is `groups x sum(split_sizes)`, and piece `i` of all
    groups together is one matrix.

    Stored weights and their views:

    - plain `[out, in]`: `MatrixView()`
    - Hugging Face `Conv1D`, `[in, out]`: `MatrixView(transposed=True)`
    - q, k, v block by block: `MatrixView(split_sizes=(q, k, v))`
    - grouped-query q, k, v, group by group: `MatrixView(split_sizes=(heads_per_group * d, d, d))`
    - gate and up, block by block: `MatrixView(split_sizes=(n, n))`
    - gate and up, row by row: `MatrixView(split_sizes=(1, 1))`
    - experts `[e, in, out]`: `MatrixView(batch_dims=1, transposed=True)`
    - the output projection of heads, `[heads, size, out]`: `MatrixView(transposed=True, first_dims=2)`

    Args:
        batch_dims: number of leading dimensions that count matrices.
        transposed: the matrix is stored `[in, out]`.
        split_dim: dimension of the logical matrix that is split: 0 rows (outputs), 1 columns (inputs).
        split_sizes: sizes along `split_dim`; empty when the matrix is not split.
        label: what the view is, for reports: `"qkv"`, `"gate_up"`... Not part of equality.
        fused: what its pieces are, for optimizers whose settings ask. Not part of equality: the matrices are the same.
        head_sizes: rows of an attention head in each piece, or in the only one, for optimizers whose settings ask;
            empty where there are no heads, or nobody knows. Not part of equality.
        head_columns: columns of an attention head, where the inputs are the outputs of heads: an output projection; 0
            where they are not. Not part of equality.
        first_dims: how many stored dimensions make the first of a matrix together.

    Raises:
        ViewError: an argument is out of range.

    Example:
        >>> import torch
        >>> qkv = MatrixView(split_sizes=(4, 2, 2), label="qkv", fused=Fused.QKV)
        >>> [tuple(m.shape) for m in qkv.matrices(torch.zeros(16, 8))]
        [(8, 8), (4, 8), (4, 8)]
    """

    batch_dims: int = 0
    transposed: bool = False
    split_dim: int = 0
    split_sizes: tuple[int, ...] = field(default=(), converter=_sizes)
    label: str = field(default="", eq=False)
    fused: Fused = field(default=Fused.NOTHING, converter=Fused, eq=False)
    head_sizes: tuple[int, ...] = field(default=(), converter=_sizes, eq=False)
    head_columns: int = field(default=0, eq=False)
    first_dims: int = 1

    def __attrs_post_init__(self) -> None:
        if self.batch_dims < 0:
            raise ViewError(f"MatrixView(batch_dims={self.batch_dims}): must not be negative")
        if self.first_dims < 1:
            raise ViewError(f"MatrixView(first_dims={self.first_dims}): must be at least 1")
        if self.split_dim not in (0, 1):
            raise ViewError(f"MatrixView(split_dim={self.split_dim}): must be 0 (rows) or 1 (columns)")
        if any(size < 1 for size in self.split_sizes):
            raise ViewError(f"MatrixView(split_sizes={self.split_sizes}): every size must be at least 1")
        if self.head_sizes:
            self._require_whole_heads()
        if self.head_columns < 0 or (self.head_columns and (self.head_sizes or self.split_sizes)):
            raise ViewError(
                f"MatrixView(split_sizes={self.split_sizes}, head_sizes={self.head_sizes}, head_columns="
                f"{self.head_columns}): must be 0, or the columns of a head in a matrix that nothing else splits"
            )

    def _require_whole_heads(self) -> None:
        """Raise unless there is one head size for each piece, which divides it."""
        pieces = self.split_sizes or (0,)
        fits = len(self.head_sizes) == len(pieces) and all(head > 0 for head in self.head_sizes)
        rows = self.split_dim == 0 and fits
        if not (rows and all(size % head == 0 for size, head in zip(pieces, self.head_sizes, strict=True))):
            raise ViewError(
                f"MatrixView(split_sizes={self.split_sizes}, head_sizes={self.head_sizes}): must be the rows of a head "
                "in each piece along the rows, or in the only piece"
            )

    @property
    def is_plain(self) -> bool:
        """True when the stored tensor is the matrix, as it is."""
        return not (self.batch_dims or self.transposed or self.split_sizes) and self.first_dims == 1

    def is_like(self, other: MatrixView, shape: Sequence[int], of: Sequence[int]) -> bool:
        """Return whether parts of one parameter, or the whole of it, are seen as the same matrices.

        Heads, and the pieces of a split that repeats, are never cut: their sizes are the same in every part. Those of a
        split that does not repeat are cut in proportion.

        Args:
            other: how the other part is seen.
            shape: of the part that this view is of.
            of: the shape of the other part.

        Example:
            >>> whole, part = MatrixView(split_sizes=(4, 2, 2)), MatrixView(split_sizes=(2, 1, 1))
            >>> whole.is_like(part, (8, 8), (4, 8)), whole.is_like(part, (8, 8), (8, 8))
            (True, False)
        """
        left, right = (astuple(view, filter=_is_kept_by_parts) for view in (self, other))
        sizes, others = self.split_sizes, other.split_sizes
        if left != right or sizes == others or tuple(shape) == tuple(of):
            return left == right and sizes == others
        in_proportion = [size * sum(others) for size in sizes] == [size * sum(sizes) for size in others]
        return in_proportion and not self._repeats(shape) and not other._repeats(of)

    def _repeats(self, shape: Sequence[int]) -> bool:
        unsplit = evolve(self, split_sizes=(), head_sizes=(), head_columns=0)
        return sum(self.split_sizes) != unsplit.logical_shape(shape)[1:][self.split_dim]

    def dim_of(self, stored: int) -> int:
        """Return the dimension of the logical matrix that a stored one, after those of the batch, is a part of.

        Args:
            stored: index of the stored dimension.

        Example:
            >>> view = MatrixView(batch_dims=1, transposed=True)
            >>> view.dim_of(1), view.dim_of(2)
            (1, 0)
        """
        is_first = stored < self.batch_dims + self.first_dims
        return 0 if is_first != self.transposed else 1

    def flattened(self, stored: torch.Tensor) -> torch.Tensor:
        """Return a stored tensor as `[*batch, first, rest]`, the unsplit matrices as they lie in memory.

        Args:
            stored: the tensor; what comes back is a view of it where strides allow.
        """
        end = self.batch_dims + self.first_dims
        return stored.flatten(end).flatten(self.batch_dims, end - 1)

    def logical_shape(self, shape: Sequence[int]) -> tuple[tuple[int, ...], int, int]:
        """Return `(batch dimensions, rows, columns)` of the unsplit logical matrix.

        Args:
            shape: shape of the stored tensor.

        Raises:
            ViewError: the view does not fit the shape.
        """
        shape = tuple(shape)
        end = self.batch_dims + self.first_dims
        if len(shape) <= end:
            raise ViewError(f"{self}: needs at least {end + 1} dimensions, the parameter has shape {shape}")
        batch, first, rest = shape[: self.batch_dims], shape[self.batch_dims : end], shape[end:]
        rows, columns = math.prod(first), math.prod(rest)
        if self.transposed:
            rows, columns = columns, rows
        if self.split_sizes:
            extent, total = (rows, columns)[self.split_dim], sum(self.split_sizes)
            if extent % total:
                raise ViewError(
                    f"{self}: the sizes add up to {total}, which does not divide the "
                    f"{extent} {('rows', 'columns')[self.split_dim]} of a parameter of shape {shape}"
                )
        return batch, rows, columns

    def matrix_shapes(self, shape: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        """Return the shape of every matrix that :meth:`matrices` gives, without a tensor.

        Args:
            shape: shape of the stored tensor.

        Raises:
            ViewError: the view does not fit the shape.
        """
        return tuple(window.shape for window in self.windows(shape))

    def windows(self, shape: Sequence[int], *, by_head: bool = False) -> tuple[MatrixWindow, ...]:
        """Return where the matrices lie in a stored tensor, to read and write each of them in place.

        Args:
            shape: shape of the stored tensor.
            by_head: give each attention head a matrix of its own (a batch dimension), where the view knows heads.

        Raises:
            ViewError: the view does not fit the shape.

        Example:
            >>> heads = MatrixView(split_sizes=(4, 2), head_sizes=(2, 2)).windows((12, 8), by_head=True)
            >>> [window.shape for window in heads]
            [(4, 2, 8), (2, 2, 8)]
        """
        return windows_of(self, shape, by_head=by_head)

    def matrices(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Return the matrices `[*batch, rows, columns]`, one per piece; views of `tensor` where strides allow.

        Args:
            tensor: the stored tensor, or any tensor of its shape (gradient, momentum).

        Raises:
            ViewError: the view does not fit the tensor.
        """
        return [window.read(tensor) for window in self.windows(tensor.shape)]

    def merge(self, matrices: Sequence[torch.Tensor], shape: Sequence[int]) -> torch.Tensor:
        """Put matrices back together: the inverse of :meth:`matrices`.

        Args:
            matrices: what `matrices` returned, or tensors of the same shapes.
            shape: shape of the stored tensor.

        Returns:
            A tensor of that shape; it may share memory with a single unsplit matrix.

        Raises:
            ViewError: number or shapes of the matrices do not fit.
        """
        windows = self.windows(shape)
        expected = tuple(window.shape for window in windows)
        got = tuple(tuple(matrix.shape) for matrix in matrices)
        if got != expected:
            raise ViewError(
                f"{self}: cannot merge matrices of shapes {got} into {tuple(shape)}; expected {expected}"
            )
        if not self.split_sizes:
            return windows[0].fold(matrices[0]).reshape(tuple(shape))
        stored = matrices[0].new_empty(tuple(shape))
        for window, matrix in zip(windows, matrices, strict=True):
            window.window(stored).copy_(window.fold(matrix))
        return stored

    def __str__(self) -> str:
        parts = []
        if self.batch_dims:
            parts.append(f"batch_dims={self.batch_dims}")
        if self.first_dims > 1:
            parts.append(f"first_dims={self.first_dims}")
        if self.transposed:
            parts.append("transposed")
        if self.split_sizes:
            parts.append(f"split {('rows', 'columns')[self.split_dim]} {self.split_sizes}")
        inside = ", ".join(parts) or "plain"
        return f"MatrixView({self.label + ': ' if self.label else ''}{inside})"


MATRIX = MatrixView()
"""The view of a plain `[out, in]` matrix."""
