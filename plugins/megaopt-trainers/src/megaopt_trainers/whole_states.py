"""One state dict of states that ranks share out, for trainers that save from one rank."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from megaopt_checkpoint import SlicedTensor

from megaopt_core.errors import StateDictError

__all__ = ["whole_state_dict"]

type _Box = tuple[tuple[int, ...], tuple[int, ...], torch.Tensor]
"""Offsets, sizes and values of a part of a tensor."""

type _Told = dict[str, tuple[torch.Size, torch.dtype, list[_Box]] | Any]
"""One rank's part of one parameter's state: boxes of tensors that are cut, everything else as it is."""


def whole_state_dict(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the state dict of one process, on rank 0: a collective that all ranks of the default group call.

    With `sharding="distributed"` or `"layer_wise"` each rank has a part of the states, and one file of one rank cannot
    hold them. Here rank 0 gets all of them, in CPU memory, parameter by parameter; `load_state_dict` gives each rank
    its part again. Where nothing is shared out, this is `optimizer.state_dict()`.

    Args:
        optimizer: an optimizer of megaopt for a model that every rank has whole (DistributedDataParallel).

    Returns:
        On rank 0 the whole state dict; on others their own, which cannot be pickled.

    Raises:
        StateDictError: on all ranks: the ranks together lack a part of a state, as under tensor parallelism.

    Example:
        >>> import torch
        >>> from megaopt_core import build_optimizer
        >>> from megaopt_trainers.whole_states import whole_state_dict
        >>> optimizer = build_optimizer(torch.nn.Linear(4, 2), "adam", lr=1e-3)
        >>> sorted(whole_state_dict(optimizer))
        ['param_groups', 'state']
    """
    own = optimizer.state_dict()
    size = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    if size == 1:
        return own
    names = [name for group in own["param_groups"] for name in group["param_names"]]
    states, lacking = {}, None
    for index, name in enumerate(names):
        told: list[_Told] | None = [{}] * size if dist.get_rank() == 0 else None
        dist.gather_object(_told(own["state"].get(index, {})), told)
        if told is not None:
            states[index], missing = _joined(told)
            lacking = lacking or (f"{name}.{missing}" if missing else None)
    said = [lacking]
    dist.broadcast_object_list(said)
    if said[0] is not None:
        raise StateDictError(
            f"the ranks together lack a part of {said[0]}: one file cannot hold the state of a model that ranks cut. "
            "Use save_checkpoint()",
            names=[said[0]],
        )
    if dist.get_rank():
        return own
    return {**own, "state": {index: state for index, state in states.items() if state}}


def _told(state: Mapping[str, Any]) -> _Told:
    return {
        key: (
            (
                value.shape,
                value.dtype,
                [(*_place(chunk), _local(value, at)) for at, chunk in enumerate(value.chunks)],
            )
            if isinstance(value, SlicedTensor)
            else value.detach().cpu()
            if isinstance(value, torch.Tensor)
            else value
        )
        for key, value in state.items()
    }


def _place(chunk: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return tuple(chunk.offsets), tuple(chunk.sizes)


def _local(value: SlicedTensor, at: int) -> torch.Tensor:
    return value.local(at).detach().to("cpu", copy=True)


def _joined(told: list[_Told]) -> tuple[dict[str, Any], str | None]:
    """Return the state that ranks have told together, and the key of one that is not whole."""
    joined: dict[str, Any] = {}
    for key in dict.fromkeys(key for each in told for key in each):
        values = [each[key] for each in told if key in each]
        cut = [value for value in values if isinstance(value, tuple)]
        if len(cut) < len(values):  # some rank has all of it
            joined[key] = next(value for value in values if not isinstance(value, tuple))
            continue
        shape, dtype, _ = cut[0]
        whole, seen = torch.zeros(shape, dtype=dtype), torch.zeros(shape, dtype=torch.bool)
        for offsets, sizes, box in (box for _, _, boxes in cut for box in boxes):
            where = tuple(slice(start, start + length) for start, length in zip(offsets, sizes, strict=True))
            whole[where], seen[where] = box, True
        if not seen.any():
            continue  # only said to be kept elsewhere, and nobody keeps it
        if not seen.all():
            return joined, key
        joined[key] = whole
    return joined, None
