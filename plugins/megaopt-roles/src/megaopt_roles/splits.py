"""Fused matrices: what the forward that takes a projection's output apart says about its view."""

from __future__ import annotations

from attrs import evolve
from torch import nn

from megaopt_core.errors import ViewError
from megaopt_core.params import Doubt, Fused, MatrixView, Role, RoleDecision
from megaopt_core.routing import doubted
from megaopt_roles.model.reading import ModelReading

__all__ = ["with_split"]


def with_split(
    decision: RoleDecision, owner: nn.Module | nn.Parameter, shape: tuple[int, ...], reading: ModelReading
) -> RoleDecision:
    """Return a decision with the split that the source of its users shows.

    Args:
        decision: what the parameter is; anything but a matrix is returned as it is.
        owner: the projection, or the bare parameter.
        shape: of the weight.
        reading: what the sources say.
    """
    if decision.role is not Role.MATRIX or decision.view is None or decision.view.split_sizes:
        return decision
    view = decision.view
    found: list[tuple[int, tuple[int, ...]]] = []
    unclear = False
    for split_dim, split in _axes(view, owner, reading):
        if split is None:
            unclear = True
        elif split:
            found.append((split_dim, split))
    if unclear or len(found) > 1:
        return doubted(decision, "its parts are used in a way that no view describes", Doubt.LAYOUT)
    heads = _heads(view, owner, reading)
    if not found:
        if len(heads) == 1:
            return evolve(decision, view=evolve(view, head_sizes=heads))
        columns = reading.head_columns.get(id(owner), 0)
        return (
            evolve(decision, view=evolve(view, head_columns=columns)) if columns and not heads else decision
        )
    split_dim, sizes = found[0]
    label = f"fused {len(sizes)}"
    weight = owner._parameters.get("weight") if isinstance(owner, nn.Module) else owner
    gates = id(owner) in reading.gates or id(weight) in reading.gates
    kind = Fused.NOTHING if gates else _kind(split_dim, sizes)
    fused = MatrixView(view.batch_dims, view.transposed, split_dim, sizes, label, kind)
    if split_dim == 0 and len(heads) == len(sizes):
        fused = evolve(fused, head_sizes=heads)
    try:
        fused.matrix_shapes(shape)
    except ViewError:
        return doubted(decision, "its split does not fit its shape", Doubt.LAYOUT)
    how = "side by side" if sum(sizes) == _extent(fused, shape) else "repeated in groups"
    return evolve(
        decision, view=fused, reason=f"{decision.reason}; forward takes {len(sizes)} parts apart, {how}"
    )


def _kind(split_dim: int, sizes: tuple[int, ...]) -> Fused:
    """Return what the parts that a forward takes apart are, as far as their number and sizes tell.

    Query, key and value: keys and values are equally large, and queries are a whole multiple. With an output gate there
    are four, of which the gate is as large as the queries.
    """
    if split_dim != 0 or len(sizes) not in (3, 4):
        return Fused.NOTHING
    query, *between, key, value = sizes
    gated = all(size == query for size in between)
    return Fused.QKV if key == value and query % key == 0 and gated else Fused.NOTHING


def _heads(view: MatrixView, owner: nn.Module | nn.Parameter, reading: ModelReading) -> tuple[int, ...]:
    """Return the rows of a head in each piece, empty where the forward does not shape its output into heads."""
    if view.batch_dims:
        return ()
    found = reading.heads.get(id(owner), ())
    if isinstance(owner, nn.Module) and not found:
        found = reading.heads.get(id(owner._parameters.get("weight")), ())
    return found


def _axes(
    view: MatrixView, owner: nn.Module | nn.Parameter, reading: ModelReading
) -> list[tuple[int, tuple[int, ...] | None]]:
    """Return what is known about the outputs and the inputs of a matrix: `(split_dim, split)`."""
    split = reading.splits.get(id(owner), ())
    if isinstance(owner, nn.Module) and not split:  # its weight may be used by hand, too
        split = reading.splits.get(id(owner._parameters.get("weight")), split)
    found = [(0, split)]
    weight = owner if isinstance(owner, nn.Parameter) else owner._parameters.get("weight")
    if weight is not None:
        for axis in range(view.batch_dims, weight.dim()):
            split = reading.cuts.get((id(weight), axis), ())
            is_output = (axis == view.batch_dims) is not view.transposed
            found.append((0 if is_output else 1, split))
    return found


def _extent(view: MatrixView, shape: tuple[int, ...]) -> int:
    _, rows, columns = view.logical_shape(shape)
    return (rows, columns)[view.split_dim]
