"""The state of a parameter as named tensors, and as the matrices that a step works on.

A parameter that is one matrix has `exp_avg`, `exp_avg_sq`, and for each side with a basis `left_factor`, `left_basis`
(`right_...`), with KL-Shampoo also `left_eigenvalues`. The further matrices of a fused weight have the same with a
number: `exp_avg_1`. Of experts the tensors have the same leading dimensions as the weight.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

import torch

from megaopt_core.errors import CheckpointMismatchError
from megaopt_core.params import MATRIX, MatrixView
from megaopt_soap.rotation import Rotation, Side
from megaopt_soap.update import MatrixState

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["SCALARS", "make_state", "matrices_of", "require_same_sides", "states_of", "view_of"]

SCALARS: Final = ("step", "exp_avg_is_rotated")
"""State that is one number, on the CPU."""

_SIDES: Final = ("left_", "right_")


def view_of(param: torch.Tensor) -> MatrixView | None:
    """Return how a parameter is seen as matrices; None: it has no basis and is stepped as by Adam.

    Args:
        param: with an attribute `param_info` that says it; without, what has two or more dimensions is a matrix.
    """
    info = getattr(param, "param_info", None)
    if info is not None:
        view: MatrixView | None = info.view
        return view
    return MATRIX if param.dim() > 1 else None


def matrices_of(param: torch.Tensor, tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the matrices `[*batch, rows, columns]` of a tensor; views of it where strides allow.

    Args:
        param: the parameter.
        tensor: itself, or a tensor of its shape.
    """
    view = view_of(param)
    return [tensor.reshape(1, -1)] if view is None else view.matrices(tensor)


def make_state(param: torch.Tensor, *, max_precond_dim: int, with_eigenvalues: bool) -> dict[str, Any]:
    """Return the state of a parameter before its first step.

    Args:
        param: the parameter.
        max_precond_dim: largest dimension that gets a basis.
        with_eigenvalues: for KL-Shampoo.
    """
    dtype = torch.promote_types(param.dtype, torch.float32)
    state: dict[str, Any] = {name: torch.zeros((), dtype=torch.float32, device="cpu") for name in SCALARS}
    for name, shape in _layout(param, max_precond_dim, with_eigenvalues).items():
        state[name] = torch.zeros(shape, dtype=dtype, device=param.device)
        if "basis" in name:
            state[name].diagonal(dim1=-2, dim2=-1).fill_(1.0)
    return state


def require_same_sides(
    param: torch.Tensor, keys: Iterable[str], *, max_precond_dim: int, with_eigenvalues: bool
) -> None:
    """Require that a parameter's state has the bases and eigenvalues that its settings ask for, and no others.

    Args:
        param: the parameter.
        keys: of its state.
        max_precond_dim: largest dimension that gets a basis.
        with_eigenvalues: for KL-Shampoo.

    Raises:
        CheckpointMismatchError: it was made with other settings, which would be gone on with in silence.
    """
    asked = {key for key in _layout(param, max_precond_dim, with_eigenvalues) if key.startswith(_SIDES)}
    there = {key for key in keys if key.startswith(_SIDES)}
    if there == asked:
        return
    found = [
        f"{verb} {', '.join(sorted(some))}"
        for verb, some in (("has", there - asked), ("lacks", asked - there))
        if some
    ]
    name = getattr(getattr(param, "param_info", None), "name", None)
    whose = f"a parameter of shape {tuple(param.shape)}" if name is None else repr(name)
    raise CheckpointMismatchError(
        f"the state of {whose} was made by SOAP with other settings than use_kl_shampoo={with_eigenvalues} and "
        f"max_precond_dim={max_precond_dim}: it {' and '.join(found)}. Go on with the settings of that run, or load "
        "no state of the optimizer, so that it starts anew",
        names=() if name is None else [name],
    )


def _layout(param: torch.Tensor, max_precond_dim: int, with_eigenvalues: bool) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor of a parameter's state by its name."""
    view, layout = view_of(param), {}
    shapes = [(1, param.numel())] if view is None else view.matrix_shapes(param.shape)
    for index, (*batch, rows, columns) in enumerate(shapes):
        for name in ("exp_avg", "exp_avg_sq"):
            layout[_key(name, index)] = (*batch, rows, columns)
        for side, size in zip(_SIDES, (rows, columns), strict=True):
            if view is None or size > max_precond_dim:
                continue
            layout[_key(f"{side}factor", index)] = (*batch, size, size)
            layout[_key(f"{side}basis", index)] = (*batch, size, size)
            if with_eigenvalues:
                layout[_key(f"{side}eigenvalues", index)] = (*batch, size)
    return layout


def states_of(
    state: Mapping[str, Any], shapes: Sequence[Sequence[int]]
) -> Iterator[tuple[int, tuple[int, ...], MatrixState]]:
    """Yield the state of every matrix, in tensors that share the memory of the parameter's state.

    Args:
        state: what :func:`make_state` returned.
        shapes: of the matrices, `[*batch, rows, columns]`.

    Yields:
        `(index of the shape, index in its batch, the matrix's state)`.
    """
    for number, shape in enumerate(shapes):
        for member in itertools.product(*map(range, shape[:-2])):

            def part(name: str, number: int = number, member: tuple[int, ...] = member) -> Any:
                tensor = state.get(_key(name, number))
                return tensor if tensor is None else tensor[member]

            sides = [
                None
                if part(f"{side}basis") is None
                else Side(part(f"{side}factor"), part(f"{side}basis"), part(f"{side}eigenvalues"))
                for side in _SIDES
            ]
            yield number, member, MatrixState(part("exp_avg"), part("exp_avg_sq"), Rotation(*sides))


def _key(name: str, index: int) -> str:
    return f"{name}_{index}" if index else name
