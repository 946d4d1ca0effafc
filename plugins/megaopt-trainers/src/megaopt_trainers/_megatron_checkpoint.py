"""The state of an optimizer as Megatron's `dist_checkpointing` saves and loads it, at any number of ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from megaopt_checkpoint import Chunk, SlicedTensor

from megaopt_core import MegatronOptimizer
from megaopt_core.errors import StateDictError
from megaopt_core.parallel import gather_objects, is_distributed

__all__ = ["FORMAT", "load_sharded", "sharded_state"]

FORMAT = "megaopt"
"""The key of a state dict under which all of it lies."""

type _Box = tuple[tuple[int, ...], tuple[int, ...]]


def sharded_state(optimizer: MegatronOptimizer) -> dict[str, Any]:
    """Return the state as Megatron's sharded tensors, one for each box that this rank holds: a collective.

    Args:
        optimizer: a built optimizer.
    """
    from megatron.core.dist_checkpointing import ShardedTensor

    whole: Any = optimizer.checkpoint_state()
    found = whole.state_dict()
    boxes = {key: dict(_boxes(tensor)) for key, tensor in found["state"].items()}
    before = _held_before([(key, box) for key, held in boxes.items() for box in held])
    state = {
        key: {
            _named(box): ShardedTensor(
                key=f"optimizer.{FORMAT}.{key}",
                data=values,
                dtype=values.dtype,
                local_shape=tuple(values.shape),
                global_shape=tuple(found["state"][key].shape),
                global_offset=box[0],
                axis_fragmentations=None,
                replica_id=before[key, box],
            )
            for box, values in held.items()
        }
        for key, held in boxes.items()
    }
    return {FORMAT: {"state": state, "description": found["description"]}}


def load_sharded(optimizer: MegatronOptimizer, loaded: Mapping[str, Any]) -> None:
    """Take over what Megatron has read into the result of :func:`sharded_state`: a collective.

    Args:
        optimizer: a built optimizer.
        loaded: that result, with tensors in the place of sharded ones.

    Raises:
        StateDictError: it is not such a result, or belongs to other parameters.
    """
    whole: Any = optimizer.checkpoint_state()
    places = whole.state_dict()["state"]
    state = {key: _filled(key, place, loaded["state"].get(key, {})) for key, place in places.items()}
    whole.load_state_dict({"state": state, "description": loaded["description"]})


def _boxes(tensor: torch.Tensor) -> Iterator[tuple[_Box, torch.Tensor]]:
    if not isinstance(tensor, SlicedTensor):
        yield ((0,) * tensor.dim(), tuple(tensor.shape)), tensor
        return
    for index, chunk in enumerate(tensor.chunks):
        if 0 not in chunk.sizes:
            yield (chunk.offsets, chunk.sizes), tensor.local(index)


def _named(box: _Box) -> str:
    return ",".join(f"{offset}+{size}" for offset, size in zip(*box, strict=True))


def _held_before(mine: list[tuple[str, _Box]]) -> Mapping[tuple[str, _Box], int]:
    """Return how many ranks before this one hold each box: the first one saves it."""
    world = dist.group.WORLD
    if not is_distributed() or world is None:
        return Counter()
    told = gather_objects(mine, world, "saving the optimizer's state")
    return Counter(box for boxes in told[: world.rank()] for box in boxes)


def _filled(key: str, place: torch.Tensor, loaded: Mapping[str, torch.Tensor]) -> torch.Tensor:
    held = []
    for box, _ in _boxes(place):
        values = loaded.get(_named(box))
        if values is None:
            raise StateDictError(
                f"the loaded state of {key!r} lacks the part {_named(box)} that this rank steps"
            )
        if not isinstance(place, SlicedTensor):
            return values
        held.append((Chunk(*box, 0, values.numel()), values.flatten))
    held += [
        (chunk, place.new_empty(0).flatten) for chunk in getattr(place, "chunks", ()) if 0 in chunk.sizes
    ]
    return SlicedTensor(place.shape, place.dtype, place.device, held)
