"""What is to be done with one parameter: its matrices, their scale, and how tensor parallelism cuts them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from attrs import evolve, frozen

from megaopt_core.errors import ViewError
from megaopt_core.params import MATRIX, Fused, MatrixView, MatrixWindow, is_marked_expert
from megaopt_muon.tensor_parallel.tp_choice import choose_tp_mode

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from megaopt_core.params import ParamInfo

__all__ = ["Cut", "MatrixPlan", "cut_of", "is_expert", "partition_dim_of", "plan_parameter", "view_of"]


@frozen
class Cut:
    """How tensor parallelism cuts a parameter.

    Args:
        group: the ranks that hold its parts, in order.
        stored_dim: dimension of the stored tensor that is cut.
        dim: the same of the logical matrix: 0 rows, 1 columns.
        mode: how its matrices are orthogonalized: `"duplicated"` or `"distributed"`; `"whole"` where each, a head, is
            on one rank.
        extent: length of the cut dimension of the whole stored tensor; None: the ranks have equal parts.
    """

    group: ProcessGroup
    stored_dim: int
    dim: int
    mode: str = "duplicated"
    extent: int | None = None

    def whole(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of the whole stored tensor.

        Args:
            shape: of a rank's part.
        """
        extent = shape[self.stored_dim] * self.group.size() if self.extent is None else self.extent
        return tuple(extent if dim == self.stored_dim else length for dim, length in enumerate(shape))


@frozen
class MatrixPlan:
    """What is to be done with one parameter.

    Args:
        shape: of this rank's stored tensor.
        view: how it is seen.
        pieces: its matrices, on this rank.
        scales: factor on each matrix's orthogonalized update.
        cut: how it is cut over ranks; None when this rank's matrices are whole, or are treated as if they were.
        gather_first: the cut runs through the pieces, so that they exist only in the gathered tensor, whose pieces
            `pieces` then describes.
    """

    shape: tuple[int, ...]
    view: MatrixView
    pieces: tuple[MatrixWindow, ...]
    scales: tuple[float, ...]
    cut: Cut | None = None
    gather_first: bool = False

    @property
    def logical_shape(self) -> tuple[tuple[int, ...], int, int]:
        """Batch dimensions, rows and columns of this rank's part, as if it were not split into pieces."""
        return evolve(self.view, split_sizes=(), head_sizes=(), head_columns=0).logical_shape(self.shape)

    @property
    def whole_logical_shape(self) -> tuple[tuple[int, ...], int, int]:
        """The same of the whole parameter, over all ranks that have parts."""
        shape = self.shape if self.cut is None else self.cut.whole(self.shape)
        return evolve(self.view, split_sizes=(), head_sizes=(), head_columns=0).logical_shape(shape)


def is_expert(param: torch.Tensor) -> bool:
    """Return whether a parameter belongs to an expert.

    Args:
        param: the tensor that is stepped.
    """
    info: ParamInfo | None = getattr(param, "param_info", None)
    if info is not None:
        return info.is_expert
    return bool(getattr(param, "expert_tp", False)) or is_marked_expert(param)


def partition_dim_of(param: torch.Tensor) -> int:
    """Return the stored dimension that tensor parallelism cuts a parameter along; -1 for none.

    Args:
        param: the tensor that is stepped.
    """
    info: ParamInfo | None = getattr(param, "param_info", None)
    dim = info.partition_dim if info is not None else getattr(param, "partition_dim", None)
    return -1 if dim is None else int(dim)


def view_of(
    param: torch.Tensor,
    *,
    split: str = "fused",
    split_qkv: bool,
    is_qkv_fn: Callable[[torch.Tensor], bool] | None,
    qkv_split_shapes: Sequence[int] | None,
) -> MatrixView:
    """Return how a parameter is seen as matrices.

    Args:
        param: the tensor that is stepped; its `param_info` says so, or it is a plain matrix.
        split: `"fused"`: as the view says; `"per_head"`: attention heads, too; `"none"`: take nothing apart.
        split_qkv: take fused query, key and value apart.
        is_qkv_fn: says which parameters without `param_info` are such; None: those with a true attribute `is_qkv`.
        qkv_split_shapes: rows of query, key and value in one query group; None: the parameter's own attribute.

    Raises:
        ViewError: the parameter is no matrix, or is fused and nobody says how.
    """
    info: ParamInfo | None = getattr(param, "param_info", None)
    if info is not None and info.view is not None:
        whole = split == "none" or (info.view.fused is Fused.QKV and not split_qkv)
        if whole:
            return evolve(info.view, split_sizes=(), head_sizes=(), head_columns=0)
        return info.view if split == "per_head" else evolve(info.view, head_sizes=(), head_columns=0)
    name = f" {info.name!r}" if info is not None else ""
    if param.dim() != 2:
        raise ViewError(
            f"parameter{name} of shape {tuple(param.shape)} is not a matrix; give it to another optimizer, or set its "
            "param_info with a MatrixView"
        )
    qkv = is_qkv_fn(param) if is_qkv_fn is not None else bool(getattr(param, "is_qkv", False))
    if not (split_qkv and qkv) or split == "none":
        return MATRIX
    sizes = getattr(param, "qkv_split_shapes", None) or qkv_split_shapes
    if not sizes:
        raise ViewError(
            f"parameter{name} is a fused query-key-value weight, but qkv_split_shapes is not given"
        )
    by_head = split == "per_head" and all(size % sizes[-1] == 0 for size in sizes)
    heads = (
        (sizes[-1],) * len(sizes) if by_head else ()
    )  # a query group has one head of keys and one of values
    return MatrixView(split_sizes=tuple(sizes), label="qkv", fused=Fused.QKV, head_sizes=heads)


def plan_parameter(
    param: torch.Tensor,
    view: MatrixView,
    group: ProcessGroup | None,
    mode: str,
    scale: Callable[[int, int], float],
) -> MatrixPlan:
    """Return what is to be done with one parameter.

    Peers that step parts of it together sum Gram matrices, whatever the mode.

    Args:
        param: the tensor that is stepped.
        view: how it is seen.
        group: the tensor-parallel ranks, None for none.
        mode: `"blockwise"`, `"duplicated"`, `"distributed"`, or `"auto"`: the faster of the last two.
        scale: factor for a matrix of `(rows, columns)`.

    Raises:
        ViewError: the view does not fit the parameter.
    """
    shape = tuple(param.shape)
    shared = _cut_of_peers(param, view)
    if shared is not None:
        complete = _local_plan(shared.whole(shape), view, scale)
        return evolve(_local_plan(shape, view, scale), scales=complete.scales, cut=shared)
    cut = cut_of(param, view, group)
    if cut is None:
        return _local_plan(shape, view, scale)
    ranks, whole = cut.group.size(), cut.whole(shape)
    extent = shape[cut.stored_dim]
    splits_cut_dim = cut.dim == _split_dim(view)
    if splits_cut_dim and extent % _together(view):
        if mode == "blockwise":
            raise ViewError(
                f"{view}: tensor parallelism cuts through its pieces (this rank holds shape {shape}), which tp_mode "
                "'blockwise' cannot orthogonalize; use 'duplicated' or 'distributed'"
            )
        return evolve(_local_plan(whole, view, scale), shape=shape, cut=cut, gather_first=True)
    plan = _local_plan(shape, view, scale)
    if mode == "blockwise":
        return plan
    if cuts_between_heads(view, cut):
        return evolve(plan, cut=evolve(cut, mode="whole"))
    complete = _local_plan(whole, view, scale)
    if mode == "auto":
        shapes = [piece.shape for piece in complete.pieces]
        mode = choose_tp_mode(shapes, cut.dim, ranks, param.dtype.itemsize, param.device.type)
    return evolve(plan, scales=complete.scales, cut=evolve(cut, mode=mode))


def cuts_between_heads(view: MatrixView, cut: Cut, extent: int | None = None) -> bool:
    """Return whether a parameter is taken apart into heads along the dimension that tensor parallelism cuts.

    Args:
        view: how it is seen.
        cut: how it is cut.
        extent: length of the cut dimension on this rank; given, its heads have to be whole there, too.
    """
    if not (view.head_sizes or view.head_columns) or cut.dim != _split_dim(view):
        return False
    return extent is None or extent % _together(view) == 0


def _together(view: MatrixView) -> int:
    """Return how many rows, or columns, of a parameter that is taken apart are taken apart together."""
    return view.head_columns or sum(view.split_sizes or view.head_sizes)


def _split_dim(view: MatrixView) -> int | None:
    """Return the dimension of the logical matrix along which it is taken apart; None where it is not."""
    if view.head_columns:
        return 1
    return view.split_dim if view.split_sizes or view.head_sizes else None


def _local_plan(shape: tuple[int, ...], view: MatrixView, scale: Callable[[int, int], float]) -> MatrixPlan:
    pieces = view.windows(shape, by_head=True)
    return MatrixPlan(shape, view, pieces, tuple(scale(*piece.shape[-2:]) for piece in pieces))


def _cut_of_peers(param: torch.Tensor, view: MatrixView) -> Cut | None:
    """Return how the ranks that step parts of a parameter together cut it; None: this rank steps alone.

    Raises:
        ViewError: the cut runs through the matrices that the parameter splits into, or tells batches apart.
    """
    info: ParamInfo | None = getattr(param, "param_info", None)
    if info is None or info.peers is None:
        return None
    stored = info.peers.dim
    dim = view.dim_of(stored)
    if stored < view.batch_dims or _split_dim(view) == dim:
        raise ViewError(f"{view}: peers cut {info.name!r} along dimension {stored}, through its matrices")
    return Cut(info.peers.group, stored, dim, "distributed", info.shape[stored])


def cut_of(param: torch.Tensor, view: MatrixView, group: ProcessGroup | None) -> Cut | None:
    """Return how tensor parallelism cuts a parameter's matrices; None where each is whole on one rank.

    Args:
        param: the tensor that is stepped.
        view: how it is seen.
        group: the tensor-parallel ranks, None for none.
    """
    if group is None or group.size() == 1:
        return None
    dim = partition_dim_of(param)
    if dim < view.batch_dims:  # not cut, or each matrix is whole on one rank
        return None
    return Cut(group, dim, view.dim_of(dim))
