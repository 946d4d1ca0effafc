"""Functions of torch that move or cut elements: their names, and running one of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

__all__ = ["PIECEWISE", "SHAPE_OPS", "by_position", "plain", "run"]

SHAPE_OPS = frozenset(
    [
        "view",
        "reshape",
        "permute",
        "transpose",
        "swapaxes",
        "swapdims",
        "movedim",
        "moveaxis",
        "flatten",
        "unflatten",
        "squeeze",
        "unsqueeze",
        "chunk",
        "split",
        "split_with_sizes",
        "tensor_split",
        "unbind",
        "narrow",
        "select",
        "expand",
        "expand_as",
        "broadcast_to",
        "repeat",
        "tile",
        "t",
        "repeat_interleave",
        "view_as",
        "reshape_as",
        "ravel",
        "adjoint",
        "rearrange",
        "glu",
    ]
)
PIECEWISE = frozenset(["chunk", "split", "split_with_sizes", "tensor_split", "unbind"])


_FIRST = ("input", "tensor", "self")
_SECOND = {
    "chunk": ("chunks",),
    "split": ("split_size_or_sections", "split_size"),
    "split_with_sizes": ("split_sizes",),
    "tensor_split": ("indices_or_sections", "sections", "indices"),
}
"""What a function of torch calls the argument that says into which parts; its method calls some of them otherwise."""


def by_position(
    name: str, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[list[Any], dict[str, Any]]:
    """Return the arguments of one of these with the tensor first, and then what says into which parts.

    Args:
        name: of the function.
        args: positional arguments.
        kwargs: keyword arguments.
    """
    placed, named = [*args], {**kwargs}
    for position, names in enumerate((_FIRST, _SECOND.get(name, ()))):
        given = next((key for key in names if key in named), None)
        if len(placed) == position and given is not None:
            placed.append(named.pop(given))
    return placed, named


def run(name: str, tensor: torch.Tensor, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Return what a function of these makes of a tensor.

    Args:
        name: of the function.
        tensor: its first argument.
        args: the others.
        kwargs: keyword arguments.
    """
    if name == "rearrange":
        from einops import rearrange  # type: ignore[import-not-found,unused-ignore]

        return rearrange(tensor, *args, **kwargs)
    if name in ("view", "reshape") and len(args) == 1 and isinstance(args[0], list):
        args = [tuple(args[0])]
    if name == "view":
        name = "reshape"
    return getattr(tensor, name)(*args, **kwargs)


def plain(args: Sequence[Any]) -> list[Any]:
    """Return arguments with their sizes as lists, whatever held them."""
    return [list(arg) if isinstance(arg, torch.Size | tuple | list) else arg for arg in args]
