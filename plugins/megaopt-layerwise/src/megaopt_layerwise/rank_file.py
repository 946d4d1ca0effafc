"""The state of one rank in a file of torch's, for the same rank of the same world."""

from __future__ import annotations

from typing import Any

import torch

from megaopt_core import MegatronOptimizer
from megaopt_core.errors import StateDictError
from megaopt_core.parallel import communicates, gather_objects

__all__ = ["load_rank_file", "raise_together", "save_rank_file"]


def save_rank_file(optimizer: MegatronOptimizer, filename: str) -> None:
    """Save the state that this rank keeps, and the group settings.

    Args:
        optimizer: a built optimizer.
        filename: the file; it is replaced.
    """
    stored = {
        "place": _place(optimizer),
        "pieces": _pieces(optimizer),
        "optimizer": _local_state_dict(optimizer),
    }
    torch.save(stored, filename)


def load_rank_file(optimizer: MegatronOptimizer, filename: str) -> None:
    """Load what :func:`save_rank_file` saved.

    Args:
        optimizer: an optimizer of the same parameters, sharded as the saved one was.
        filename: the file.

    Raises:
        StateDictError: it was saved at another place, in another world, or where ranks owned other parts of parameters;
            or it is no such file; or another rank cannot load. Nothing has changed on any rank.
        OSError: the file cannot be read.
    """
    stored, failure = dict[str, Any](), None
    try:
        stored = _read(optimizer, filename)
    except Exception as error:  # noqa: BLE001 - the other ranks wait to hear of it
        failure = error
    raise_together(optimizer, failure)
    optimizer.load_state_dict(stored["optimizer"])


def raise_together(optimizer: MegatronOptimizer, failure: Exception | None) -> None:
    """Raise on all ranks that hold a part of the model, or a copy, if one of them cannot load.

    Args:
        optimizer: what loads.
        failure: this rank's error, None where there is none.

    Raises:
        StateDictError: another rank has failed; this rank's own error is raised as it is.
    """
    pgs = optimizer.process_groups
    told = None if failure is None else f"{type(failure).__name__}: {failure}"
    for group in (pgs.mp, pgs.dense_dp):
        if group is not None and communicates(group):
            of_ranks = gather_objects(told, group, "the agreement on what is loaded")
            told = next((each for each in of_ranks if each is not None), None)
    if failure is not None:
        raise failure
    if told is not None:
        raise StateDictError(f"another rank cannot load its state: {told}")


def _read(optimizer: MegatronOptimizer, filename: str) -> dict[str, Any]:
    stored: Any = torch.load(filename, weights_only=True, map_location="cpu")
    if not isinstance(stored, dict) or set(stored) != {"place", "pieces", "optimizer"}:
        raise StateDictError(f"{filename}: save_state_dict_to_file has not written it")
    saved, here = stored["place"], _place(optimizer)
    if saved != here:
        raise StateDictError(
            f"{filename}: saved on a rank that stood at {_told(saved)}, loaded at {_told(here)}; {_ELSEWHERE}"
        )
    then, now = stored["pieces"], _pieces(optimizer)
    if then != now:
        names = sorted({piece[0] for piece in {*then} ^ {*now}})
        raise StateDictError(
            f"{filename}: this rank steps other parts of parameters than when it was saved, such as of {names[0]!r}: "
            f"owners are planned from the model, bucket_size, settings and calibration; {_ELSEWHERE}",
            names=names,
        )
    return stored


_ELSEWHERE = "checkpoints (save_checkpoint, checkpoint_state) go to any other world and plan"


def _pieces(optimizer: MegatronOptimizer) -> list[tuple[Any, ...]]:
    """Return which elements this rank steps: name, box, and the range inside the box."""
    members = (shard for part in optimizer.parts for piece in part.pieces for _, shard in piece.spec.members)
    return sorted((shard.name, *shard.box, shard.start, shard.stop) for shard in members)


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
