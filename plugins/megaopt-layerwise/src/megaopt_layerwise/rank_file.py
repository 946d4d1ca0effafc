"""The state of one rank in a file of torch's, for the same rank of the same world."""

from __future__ import annotations

from typing import Any

import torch

from megaopt_core import MegatronOptimizer
from megaopt_core.errors import StateDictError

__all__ = ["load_rank_file", "save_rank_file"]


def save_rank_file(optimizer: MegatronOptimizer, filename: str) -> None:
    """Save the state that this rank keeps, and the group settings.

    Args:
        optimizer: a built optimizer.
        filename: the file; it is replaced.
    """
    torch.save({"place": _place(optimizer), "optimizer": _local_state_dict(optimizer)}, filename)


def load_rank_file(optimizer: MegatronOptimizer, filename: str) -> None:
    """Load what :func:`save_rank_file` saved.

    Args:
        optimizer: an optimizer of the same parameters, sharded as the saved one was.
        filename: the file.

    Raises:
        StateDictError: it was saved at another place or in another world.
    """
    stored: dict[str, Any] = torch.load(filename, weights_only=True, map_location="cpu")
    saved, here = stored["place"], _place(optimizer)
    if saved != here:
        raise StateDictError(
            f"{filename}: saved on a rank that stood at {_told(saved)}, loaded at {_told(here)}; checkpoints "
            "(save_checkpoint, checkpoint_state) go to any other world"
        )
    optimizer.load_state_dict(stored["optimizer"])


def _place(optimizer: MegatronOptimizer) -> dict[str, tuple[int, int]]:
    """Return where this rank stands, and of how many: by axis."""
    pgs = optimizer.process_groups
    sizes, places = pgs.axes, pgs.coordinates
    return {axis: (places[axis], size) for axis, size in sizes.items() if size > 1}


def _told(place: dict[str, tuple[int, int]]) -> str:
    return ", ".join(f"{axis} {at} of {size}" for axis, (at, size) in place.items()) or "one rank alone"


def _local_state_dict(optimizer: MegatronOptimizer) -> dict[str, Any]:
    """Return torch's schema with what this rank has of each parameter's state, which may be a slice or nothing."""
    groups, state, fresh = [], {}, []
    position = 0
    for group in optimizer.param_groups:
        params = group["params"]
        settings = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        names = [optimizer.names[param] for param in params]
        groups.append(
            {**settings, "params": list(range(position, position + len(params))), "param_names": names}
        )
        for name, param in zip(names, params, strict=True):
            live = optimizer.state[param]
            state[position] = {key: _plain(value) for key, value in live.items()}
            if getattr(live, "is_fresh", False):
                fresh.append(name)
            position += 1
    found: dict[str, Any] = {"state": state, "param_groups": groups}
    if fresh:
        found["fresh"] = fresh
    if optimizer.grad_scaler is not None:
        found["grad_scaler"] = optimizer.grad_scaler.state_dict()
    return found


def _plain(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value
