"""Numbers of parameters of which a rank has no elements, and so no state: the ranks that have some tell them.

torch's functions for state dicts want the same keys on every rank, and save any one of the numbers that ranks show.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, MutableMapping
from typing import TYPE_CHECKING, Any

import torch
from megaopt_checkpoint import SlicedTensor

from megaopt_core.parallel import communicates, gather_objects
from megaopt_core.params import is_dtensor, local_tensor

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["tell_numbers"]

_WHAT = "the exchange of step counts with ranks that have no elements of a parameter"


def tell_numbers(
    params: Mapping[str, torch.nn.Parameter], states: Mapping[str, MutableMapping[str, Any]]
) -> None:
    """Show numbers on every rank: a collective, where a parameter has fewer rows than there are ranks.

    Args:
        params: all parameters by name, the same on all ranks; those that are no DTensors are left alone.
        states: what this rank shows of the state of each; changed in place.
    """
    for group, names in _too_small(params).items():
        held = [name for name in names if local_tensor(params[name]).numel()]
        for told in gather_objects({name: _numbers(states[name]) for name in held}, group, _WHAT):
            for name, numbers in told.items():
                for key, (number, on_cpu) in numbers.items():
                    is_here = on_cpu or not isinstance(number, torch.Tensor)
                    found = number if is_here else number.to(local_tensor(params[name]).device)
                    states[name].setdefault(key, found)


def _too_small(params: Mapping[str, torch.nn.Parameter]) -> dict[ProcessGroup, list[str]]:
    """Return the parameters that may leave a rank without elements, by each group of ranks that cut them."""
    found: dict[ProcessGroup, list[str]] = {}
    for name, param in params.items():
        if not is_dtensor(param):
            continue
        mesh, placements = param.device_mesh, param.placements  # type: ignore[attr-defined] # of DTensors
        cuts = [(dim, cut.dim) for dim, cut in enumerate(placements) if cut.is_shard()]
        for dim, cut in cuts:
            ranks = math.prod(mesh.size(other) for other, same in cuts if same == cut)
            rows = -(-param.shape[cut] // ranks)
            group = mesh.get_group(dim)
            if (ranks - 1) * rows >= param.shape[cut] and communicates(group):
                found.setdefault(group, []).append(name)
    return found


def _numbers(values: Mapping[str, Any]) -> dict[str, tuple[Any, bool]]:
    """Return what is no part of a tensor, and whether it lies on the CPU."""
    numbers: dict[str, tuple[Any, bool]] = {}
    for key, value in values.items():
        if not isinstance(value, torch.Tensor):
            numbers[key] = value, True
        elif value.numel() == 1 and not isinstance(value, SlicedTensor) and not is_dtensor(value):
            numbers[key] = value.detach().cpu(), value.is_cpu
    return numbers
