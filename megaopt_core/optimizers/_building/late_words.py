"""Words for parameters that changed after the build."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from megaopt_core.errors import OwnershipError

__all__ = ["changed_error", "in_words", "kind_of", "listed", "words_of"]


def in_words(replaced: bool) -> str:
    """Return in words how a parameter began to train.

    Args:
        replaced: it took the place of another of its name.
    """
    return "replaced, as load_state_dict(assign=True) does" if replaced else "unfrozen or added"


def listed(names: Sequence[str]) -> str:
    """Return names as a message shows them.

    Args:
        names: at least one.
    """
    shown = ", ".join(map(repr, names[:5]))
    return shown if len(names) <= 5 else f"{shown} and {len(names) - 5} more"


def kind_of(param: torch.Tensor) -> tuple[object, ...]:
    """Return what must be the same of a parameter that takes the place of another.

    Args:
        param: the parameter.
    """
    return param.shape, param.dtype, param.device, type(param.data)


def words_of(param: torch.Tensor) -> str:
    """Return dtype, shape and device in words.

    Args:
        param: the parameter.
    """
    return f"{str(param.dtype).removeprefix('torch.')} {tuple(param.shape)} on {param.device}"


def changed_error(kind: str, changed: Sequence[tuple[str, Any, torch.nn.Parameter]]) -> OwnershipError:
    """Return the error of parameters that have another dtype, shape or device than at the build.

    Args:
        kind: which of these.
        changed: name, value of before, and parameter.
    """
    names = [name for name, _, _ in changed]
    name, before, param = changed[0]
    return OwnershipError(f"{listed(names)}: {name!r} {_CHANGED[kind](before, param)}", names=names)


_CHANGED: Mapping[str, Callable[[Any, torch.Tensor], str]] = {
    "dtype": lambda before, param: (
        f"is {str(param.dtype).removeprefix('torch.')} now and was {str(before).removeprefix('torch.')} when its "
        "optimizer was built: convert the model (.to(dtype), .half(), .bfloat16()) before building its optimizer"
    ),
    "device": lambda before, param: (
        f"is on {param.device} now and was on {before} when its optimizer was built, which keeps its states there: "
        "move the model (.to(device), .cuda()) before building its optimizer"
    ),
    "shape": lambda before, param: (
        f"has shape {tuple(param.shape)} now and had {tuple(before)} when its optimizer was built, whose states have "
        "that one: give its module a new torch.nn.Parameter and build the optimizer anew"
    ),
}
