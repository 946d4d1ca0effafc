"""The ranks of a save hold every element of all that is saved together, or the save is refused."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from megaopt_checkpoint.coverage import tiles
from megaopt_checkpoint.ranks import Ranks
from megaopt_core.errors import CheckpointError
from megaopt_core.params import shown
from megaopt_core.state import OwnedState, piece_states

if TYPE_CHECKING:
    import torch

    from megaopt_core.optimizers import MegatronOptimizer

__all__ = ["require_coverage"]


def require_coverage(
    optimizer: MegatronOptimizer | None, model: Mapping[str, torch.Tensor], ranks: Ranks
) -> None:
    """Raise unless the ranks hold every element of what is stepped, and every stage of the model: a collective.

    Args:
        optimizer: a built optimizer, or None.
        model: this rank's tensors of the model, by key.
        ranks: who saves.

    Raises:
        CheckpointError: parts are with ranks that do not save.
    """
    routing = None if optimizer is None else optimizer.routing
    axes = {} if routing is None else {axis: routing.axes.get(axis, 1) for axis in ("pp", "tp", "ep")}
    told: dict[str, Any] = {
        "held": {**_boxes_of(model), **({} if optimizer is None else _held(optimizer))},
        "shapes": {
            **{key: [*tensor.shape] for key, tensor in model.items()},
            **({} if optimizer is None else _shapes(optimizer)),
        },
        "at": {} if routing is None else {axis: routing.rank.get(axis, 0) for axis in axes},
        "axes": axes,
    }
    everyone = ranks.gather_different(told)
    shapes = {name: tuple(shape) for of_rank in everyone for name, shape in of_rank["shapes"].items()}
    ranges: dict[str, dict[Any, set[Any]]] = defaultdict(lambda: defaultdict(set))
    for of_rank in everyone:
        for name, parts in of_rank["held"].items():
            for offsets, sizes, start, stop in parts:
                ranges[name][tuple(offsets), tuple(sizes)].add((start, stop))
    lost = [name for name, shape in shapes.items() if not _covered(shape, ranges[name])]
    for axis, size in {axis: size for of_rank in everyone for axis, size in of_rank["axes"].items()}.items():
        absent = set(range(size)) - {of_rank["at"].get(axis, 0) for of_rank in everyone}
        lost += [f"all of {axis} rank {at}" for at in sorted(absent)]
    if lost:
        raise CheckpointError(
            f"the {ranks.size} ranks that save do not hold all of the state: {shown(sorted(lost))} is on other "
            "ranks, and the checkpoint could not be loaded. Save with all ranks that the optimizer was built on, "
            "before destroy_process_group(), and without a process_group= of fewer ranks; an older checkpoint at the "
            "path is unchanged"
        )


def _held(optimizer: MegatronOptimizer) -> dict[str, list[Any]]:
    """Return which elements this rank holds states of, those of owners under names of their own."""
    found: dict[str, list[Any]] = defaultdict(list)
    for piece in piece_states(optimizer):
        kind = "owned " if isinstance(piece, OwnedState) else ""
        for _, shard in piece.members:
            offsets, sizes = shard.box
            found[kind + shard.name].append([list(offsets), list(sizes), shard.start, shard.stop])
    return dict(found)


def _boxes_of(model: Mapping[str, torch.Tensor]) -> dict[str, list[Any]]:
    """Return the boxes of the model's tensors that this rank holds; of one that is not cut, all."""
    found: dict[str, list[Any]] = {}
    for key, tensor in model.items():
        cut = getattr(tensor, "__create_chunk_list__", None)
        boxes = (
            [([0] * tensor.dim(), [*tensor.shape])] if cut is None else [(b.offsets, b.sizes) for b in cut()]
        )
        found[key] = [[[*offsets], [*sizes], 0, math.prod(sizes)] for offsets, sizes in boxes]
    return found


def _shapes(optimizer: MegatronOptimizer) -> dict[str, list[int]]:
    """Return the shape of every parameter that the ranks together hold states of."""
    routes: Mapping[str, Any] = {} if optimizer.routing is None else optimizer.routing.params
    found: dict[str, list[int]] = {}
    for part in optimizer.parts:
        owned = part.split is not None and bool(part.split.transform_keys)
        for param in (param for group in part.groups for param in group["params"]):
            name = optimizer.names[param]
            shape = [*(routes[name].spec.shape if name in routes else param.shape)]
            found[name] = shape
            if owned:
                found[f"owned {name}"] = shape
    return found


def _covered(shape: tuple[int, ...], ranges: Mapping[Any, set[Any]]) -> bool:
    """Return whether ranges of boxes make up a shape."""
    whole = [box for box, parts in ranges.items() if math.prod(box[1]) and _is_whole(box[1], parts)]
    return 0 in shape or ((tuple(0 for _ in shape), shape) in whole) or tiles(shape, whole)


def _is_whole(sizes: tuple[int, ...], parts: set[Any]) -> bool:
    end = 0
    for start, stop in sorted(parts):
        if start > end:
            return False
        end = max(end, stop)
    return end >= math.prod(sizes)
