"""Functions of torch that move or cut elements: their names, and running one of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

__all__ = ["PIECEWISE", "SHAPE_OPS", "plain", "run"]

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
