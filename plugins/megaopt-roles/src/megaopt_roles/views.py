"""The matrices inside a parameter, from the dimensions that products summed over and the parts that were cut."""

from __future__ import annotations

from itertools import accumulate
from math import prod

from attrs import evolve

from megaopt_core.errors import ViewError
from megaopt_core.params import Fused, MatrixView
from megaopt_roles.watch import Notes, Run

__all__ = ["seen_view"]

_MOST_PIECES = 16


def seen_view(
    shape: tuple[int, ...], param: int, notes: Notes, base: MatrixView | None = None
) -> MatrixView | None:
    """Return how a parameter is seen as matrices; None where that is not known.

    Args:
        shape: of the parameter.
        param: its identity.
        notes: what a forward showed.
        base: the view that its module's type says, without a split; None: the products tell.
    """
    view = _layout(shape, param, notes) if base is None else base
    if view is None or view.split_sizes:
        return view
    splits: list[MatrixView] = []
    for dim in range(view.batch_dims, len(shape)):
        for run in [run for run in notes.cuts if (run.param, run.dim, run.first) == (param, dim, 0)]:
            if not notes.is_split(run):
                continue
            unit = _unit(view, shape, dim)
            sizes = tuple(size * unit for size in _sizes(run, notes))
            if 2 <= len(sizes) <= _MOST_PIECES:
                split = evolve(view, split_dim=view.dim_of(dim), split_sizes=sizes)
                if _fits(split, shape) and (split.split_dim == 0 or run in notes.cut_inside):
                    splits.append(split)
    if not splits:
        return _with_heads(view, param, notes)
    best = max(splits, key=lambda split: (split.split_dim == 0, len(split.split_sizes)))
    return _with_heads(evolve(best, label=f"fused {len(best.split_sizes)}"), param, notes)


def _unit(view: MatrixView, shape: tuple[int, ...], dim: int) -> int:
    """Return how many rows, or columns, of the matrix one index of a stored dimension stands for."""
    later = range(dim + 1, len(shape))
    return prod(shape[other] for other in later if view.dim_of(other) == view.dim_of(dim))


def _fits(view: MatrixView, shape: tuple[int, ...]) -> bool:
    try:
        shapes = view.matrix_shapes(shape)
    except ViewError:
        return False
    return not view.split_sizes or any(piece[-2] > 1 for piece in shapes)


def _layout(shape: tuple[int, ...], param: int, notes: Notes) -> MatrixView | None:
    """Return which dimensions count matrices, and which are outputs and inputs."""
    found = notes.products.get(param) or notes.inner.get(param, set())
    ins = {product.ins for product in found if product.ins}
    outs = {product.outs for product in found if product.outs}
    if (
        len(shape) == 2 and not ins and len(outs) == 1
    ):  # a side of one, or what another has beside it, is summed
        return MatrixView(transposed=outs == {frozenset({1})})
    if len(outs) > 1 and (common := frozenset.intersection(*outs)):
        outs = {common}  # one of a stack by itself, and several of them side by side
    if len(ins) != 1 or len(outs) > 1:
        return None
    in_dims, out_dims = set(next(iter(ins))), set(next(iter(outs), frozenset()))
    if len(shape) == 2:
        return MatrixView(transposed=in_dims == {0})
    real = {dim for dim, size in enumerate(shape) if size > 1}
    batch = (real - in_dims - out_dims) | (in_dims & out_dims)
    if max(out_dims, default=0) > max(in_dims):
        batch |= {dim for dim in out_dims if dim < min(in_dims)}  # [3, in, heads, size] is cut in front
    in_dims, out_dims = in_dims - batch, out_dims - batch
    if batch != set(range(len(batch))) or not in_dims or not out_dims:
        return None
    transposed = min(in_dims) < min(out_dims)
    view = MatrixView(len(batch), transposed, first_dims=len(in_dims if transposed else out_dims))
    return view if _fits(view, shape) else None


def _sizes(run: Run, notes: Notes) -> tuple[int, ...]:
    """Return the sizes of the parts of a run, and of their parts; none where these do not lie side by side."""
    at, sizes = 0, list[int]()
    for begin, length in sorted(notes.cuts[run]):
        if begin != at:
            return ()
        at = begin + length
        part = Run(run.param, run.dim, run.first + begin * run.stride, length, run.stride)
        inner = _sizes(part, notes) if part in notes.cuts and notes.is_split(part) else ()
        sizes.extend(inner or (length * run.stride,))
    return tuple(sizes) if at == run.size else ()


def _with_heads(view: MatrixView, param: int, notes: Notes) -> MatrixView:
    """Return a view with the heads of its pieces, where attention took each of them in heads."""
    heads = notes.heads.get(param, set())
    columns = notes.columns.get(param, set())
    if len(columns) == 1 and not view.batch_dims and not view.split_sizes and not heads:
        return evolve(view, head_columns=max(columns))
    if view.batch_dims or not heads or view.split_dim != 0:
        return view
    if not view.split_sizes:
        whole = {size for parts, size in heads if not parts}
        return evolve(view, head_sizes=tuple(whole)) if len(whole) == 1 else view
    by_start: dict[int, set[int]] = {}
    for parts, size in heads:
        for run, begin in parts:
            by_start.setdefault(run.first + begin * run.stride, set()).add(size)
    found = [by_start.get(start, set()) for start in [0, *accumulate(view.split_sizes)][:-1]]
    if len(found) not in (3, 4) or any(len(own) != 1 for own in (found[0], *found[-2:])):
        return view
    sizes = tuple(next(iter(own or found[0])) for own in found)
    if any(size % head for size, head in zip(view.split_sizes, sizes, strict=True)):
        return view
    return evolve(view, fused=Fused.QKV, label="qkv", head_sizes=sizes)
