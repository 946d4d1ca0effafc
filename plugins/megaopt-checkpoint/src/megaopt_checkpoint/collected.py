"""This rank's part of an optimizer's state, as slices of named logical tensors: what is saved, whatever the layout."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from attrs import define, field

from megaopt_checkpoint.values.encoding import encode
from megaopt_checkpoint.values.sliced import joined, sliced
from megaopt_core.errors import CheckpointError
from megaopt_core.execution import is_placeholder
from megaopt_core.precision import CodedState
from megaopt_core.state import PieceState, is_number, piece_states

if TYPE_CHECKING:
    from megaopt_core.optimizers import MegatronOptimizer

__all__ = ["Collected", "collect_state", "state_key"]

PREFIX = "optim.state"


def state_key(name: str, key: str) -> str:
    """Return the key of a state tensor in a checkpoint.

    Args:
        name: of the parameter.
        key: of its state.
    """
    return f"{PREFIX}.{name}.{key}"


@define
class Collected:
    """This rank's part of an optimizer's state.

    Args:
        tensors: key to tensor: slices of logical tensors, and whole tensors of other shapes.
        state: parameter name to state key to record: `{"tensor": key}` for slices, with `"codes": [...]` where they are
            stored in a code, `{"ranges": [...]}` for numbers, `{"objects": [...]}` for anything else.
        shapes: parameter name to the shape of the whole parameter.
        fresh: parameters whose state their first step will make.
    """

    tensors: dict[str, torch.Tensor] = field(factory=dict)
    state: dict[str, dict[str, Any]] = field(factory=dict)
    shapes: dict[str, tuple[int, ...]] = field(factory=dict)
    fresh: set[str] = field(factory=set)

    def add_slices(
        self,
        piece: PieceState,
        key: str,
        like: torch.Tensor | CodedState,
        elements: Callable[[int, int], torch.Tensor],
    ) -> None:
        """Add the elements of a state that each parameter of a piece has.

        Args:
            piece: the piece.
            key: the state's key.
            like: has their dtype and device.
            elements: `(start, stop)` to the elements of this range of the flattened piece, flat.
        """
        for offset, shard in piece.members:
            name = state_key(shard.name, key)
            self.state[shard.name].setdefault(key, {})["tensor"] = name
            if shard.numel or 0 in shard.shape:
                flat = partial(elements, offset, offset + shard.numel)
                part = sliced(shard, like.dtype, like.device, flat)
                self.tensors[name] = joined(self.tensors.get(name), part)


def collect_state(optimizer: MegatronOptimizer, *, with_placeholders: bool = False) -> Collected:
    """Return this rank's state; no tensor is copied, what precision policies compute is computed when it is needed.

    Args:
        optimizer: a built optimizer.
        with_placeholders: `tensors` holds those that stand in for state before the first step too: places to load into.

    Raises:
        CheckpointError: a state is neither elementwise, nor a number, nor of a whole parameter.
    """
    collected = Collected()
    for piece in piece_states(optimizer):
        for _, shard in piece.members:
            collected.state.setdefault(shard.name, {})
            collected.shapes[shard.name] = shard.shape
        into = collected
        if is_placeholder(piece.inner):
            names = [shard.name for _, shard in piece.members]
            collected.fresh.update(names)
            into = Collected(collected.tensors if with_placeholders else {}, {name: {} for name in names})
        for key, value in piece.inner.items():
            coded = piece.coded(key)
            if coded is not None:
                _collect_coded(into, piece, key, coded)
            elif not piece.part.precision.is_code(key):
                _collect(into, piece, key, value)
        for key, value in piece.extra.items():
            collected.add_slices(piece, key, value, partial(_elements_of_extra, piece, key))
    return collected


def _elements_of_extra(piece: PieceState, key: str, start: int, stop: int) -> torch.Tensor:
    """Return elements of what the precision policy keeps, which some compute when they are asked."""
    return _elements(piece.extra[key], start, stop)


def _elements(value: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    return value.detach().reshape(-1)[start:stop]


def _collect_coded(collected: Collected, piece: PieceState, key: str, coded: CodedState) -> None:
    """Add a state in a code: its elements as slices, and with each range of them what decodes it."""
    collected.add_slices(piece, key, coded, coded.elements)
    for offset, shard in piece.members:
        where = (
            f"{state_key(shard.name, key)}.code@{','.join(map(str, shard.box[0]))}:{shard.start}-{shard.stop}"
        )
        encoded = encode(coded.values(offset, offset + shard.numel), collected.tensors, where)
        entry = [*shard.box, shard.start, shard.stop, coded.code, encoded]
        collected.state[shard.name][key].setdefault("codes", []).append(entry)


def _collect(collected: Collected, piece: PieceState, key: str, value: Any) -> None:
    if piece.is_elementwise(key, value):
        collected.add_slices(piece, key, value, partial(_elements, value))
        return
    if is_number(value):
        for _, shard in piece.members:
            encoded = encode(value, {}, f"state {key!r} of {shard.name!r}")
            record = collected.state[shard.name].setdefault(key, {"ranges": []})
            record["ranges"].append([*shard.box, shard.start, shard.stop, encoded])
        return
    _, shard = piece.members[0]
    if not piece.is_whole:
        raise CheckpointError(
            f"state {key!r} of {shard.name!r} has neither its parameter's shape nor one element, and this rank "
            "steps only a part of the parameter: no other layout could load it"
        )
    # Where tensor parallelism cuts the parameter, every rank has a state of its own.
    box = "" if shard.is_whole else "@" + ",".join(map(str, shard.box[0]))
    tensors: dict[str, torch.Tensor] = {}
    encoded = encode(value, tensors, state_key(shard.name, f"{key}{box}"))
    collected.tensors.update(tensors)
    collected.state[shard.name][key] = {"objects": [[*shard.box, encoded]]}
