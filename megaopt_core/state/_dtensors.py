"""State of DTensors' local tensors as DTensors, which torch's functions gather, send and cut; and back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from megaopt_core.params._parts import is_dtensor, local_tensor

if TYPE_CHECKING:
    from megaopt_core.state._protocol import NamedPieces

__all__ = ["as_dtensor", "dtensors_of", "local_like"]


def dtensors_of(part: NamedPieces) -> list[torch.nn.Parameter]:
    """Return the DTensors of a part that steps local tensors: the same on all ranks, whatever a rank has of them.

    Args:
        part: some of an optimizer's pieces.
    """
    if not part.sharded.steps_local_tensors:
        return []
    return [param for group in part.groups for param in group["params"] if is_dtensor(param)]


def as_dtensor(param: torch.nn.Parameter, elements: torch.Tensor) -> torch.Tensor:
    """Return this rank's elements of a state as part of a DTensor that is cut like the parameter, sharing memory.

    Args:
        param: a DTensor.
        elements: one for each that this rank has of it.
    """
    from torch.distributed.tensor import DTensor

    like: Any = param
    return DTensor.from_local(
        elements.view(local_tensor(param).shape),
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=param.shape,
        stride=param.stride(),
    )


def local_like(param: torch.Tensor | None, value: torch.Tensor) -> torch.Tensor | None:
    """Return the local tensor of a DTensor that is cut as a parameter is; None for anything else.

    Args:
        param: the parameter.
        value: a state.
    """
    if param is None or not is_dtensor(param) or not is_dtensor(value):
        return None
    ours: Any = param
    theirs: Any = value
    same = (ours.device_mesh, ours.placements) == (theirs.device_mesh, theirs.placements)
    return local_tensor(value) if same and ours.shape == theirs.shape else None
