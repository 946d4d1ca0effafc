"""States that owners keep of whole tensors, as DTensors over all ranks that share these tensors; and back.

torch's functions for state dicts want the same keys on every rank. So an owner's tensors become DTensors, cut by rows
over the ranks among which owners were chosen, and all ranks are told its numbers; a load brings the rows back.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from attrs import define, field, frozen

from megaopt_core.errors import CheckpointError, MegaoptError, StateDictError
from megaopt_core.parallel._groups import communicates
from megaopt_core.parallel._reduction import gather_objects
from megaopt_core.params._parts import is_dtensor, local_tensor
from megaopt_core.params._shards import Box, numel_of, whole
from megaopt_core.state._pieces import OwnedState, piece_states
from megaopt_core.state._spread.boxes import move_boxes, rows_of
from megaopt_core.state._values.encoding import decode, encode
from megaopt_core.state._values.sliced import SlicedTensor

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from megaopt_core.state._protocol import NamedPieces, NamedState

__all__ = ["brought_to_owners", "refused_together", "tell_all"]

_WHAT = "the exchange of states with their owners"


@frozen
class _Parts:
    """A tensor, and which boxes of it a rank has."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    boxes: tuple[Box, ...] = ()


@define
class _Told:
    """States of a rank: parameter name to state key to encoded value; the tensors in it; or why it has none."""

    states: dict[str, dict[str, Any]] = field(factory=dict)
    tensors: dict[str, _Parts] = field(factory=dict)
    failure: str | None = None


def tell_all(optimizer: NamedState, values: Mapping[str, MutableMapping[str, Any]]) -> None:
    """Show on every rank what owners keep: a collective where they keep something.

    Args:
        optimizer: a built optimizer.
        values: what this rank exports: parameter name to state; changed in place.

    Raises:
        StateDictError: several owners keep a state of one parameter which has not its shape, or a state is no tensor,
            number or plain value; on all ranks.
    """
    for part, group in _with_owners(optimizer):
        tensors: dict[str, torch.Tensor] = {}
        params = {optimizer.names[param]: param for each in part.groups for param in each["params"]}
        told = _Told()
        try:
            told.states = {name: _taken(part, name, values[name], tensors) for name in params}
        except CheckpointError as error:
            told.failure = str(error)
        told.tensors.update((where, _parts_of(tensor)) for where, tensor in tensors.items())
        from_all = gather_objects(told, group, _WHAT)
        for each in from_all:
            if each.failure is not None:
                raise StateDictError(each.failure)
        shared = _shared(from_all, tensors, local_tensor(next(iter(params.values()))).device, group)
        for each in from_all:
            for name, state in each.states.items():
                for key, encoded in state.items():
                    values[name].setdefault(key, decode(encoded, shared.__getitem__))


def _with_owners(optimizer: NamedState) -> Iterator[tuple[NamedPieces, ProcessGroup]]:
    """Yield the parts of which some rank keeps states of whole tensors, with the ranks that share them."""
    for part in optimizer.parts:
        group = part.sharded.owners_group
        keeps = not part.sharded.steps_local_tensors or (part.split is not None and part.split.transform_keys)
        if group is not None and communicates(group) and keeps:
            yield part, group


def _is_owned(part: NamedPieces, key: str) -> bool:
    """Return whether a state is of whole tensors, and with their owner."""
    is_of_transform = part.split is not None and key in part.split.transform_keys
    return is_of_transform or not part.sharded.steps_local_tensors


def _taken(
    part: NamedPieces, name: str, values: MutableMapping[str, Any], tensors: dict[str, torch.Tensor]
) -> dict[str, Any]:
    """Take what owners keep out of a parameter's state, and return it encoded."""
    keys = [key for key in values if _is_owned(part, key)]
    return {key: encode(values.pop(key), tensors, f"{name}.{key}") for key in keys}


def _parts_of(tensor: torch.Tensor) -> _Parts:
    boxes = (
        tuple((chunk.offsets, chunk.sizes) for chunk in tensor.chunks)
        if isinstance(tensor, SlicedTensor)
        else (whole(tensor.shape),)
    )
    return _Parts(tuple(tensor.shape), tensor.dtype, boxes)


def _shared(
    from_all: Sequence[_Told],
    mine: Mapping[str, torch.Tensor],
    device: torch.device,
    group: ProcessGroup,
) -> dict[str, torch.Tensor]:
    """Return the tensors of all ranks as DTensors."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Shard

    mesh, shared = DeviceMesh.from_group(group, device.type), dict[str, torch.Tensor]()
    every = {where: parts for told in from_all for where, parts in told.tensors.items()}
    held = {
        where: [told.tensors[where].boxes if where in told.tensors else () for told in from_all]
        for where in every
    }
    for where, parts in every.items():
        _require_once(where, parts, held[where])
    for where, parts in every.items():
        (rows,) = move_boxes(
            held[where],
            [[rows] for rows in rows_of(parts.shape, group.size())],
            partial(_box_of, mine.get(where)),
            torch.empty(0, dtype=parts.dtype, device=device),
            group,
            _WHAT,
        )
        stride = torch.empty(parts.shape, device="meta").stride()
        shared[where] = DTensor.from_local(
            rows, mesh, [Shard(0)], run_check=False, shape=torch.Size(parts.shape), stride=stride
        )
    return shared


def _require_once(where: str, parts: _Parts, held: Sequence[Sequence[Box]]) -> None:
    elements = sum(numel_of(box) for boxes in held for box in boxes)
    if elements != torch.Size(parts.shape).numel():
        raise StateDictError(
            f"{where!r} is kept by several ranks that own some of its matrices, each its own, which a state dict of "
            "torch cannot say; save_checkpoint() and checkpoint_state() can",
            names=[where.rpartition(".")[0]],
        )


def _all_of(tensor: torch.Tensor, _: Box) -> torch.Tensor:
    return tensor


def _box_of(tensor: torch.Tensor | None, box: Box) -> torch.Tensor:
    if isinstance(tensor, SlicedTensor):
        return tensor.box(*box).detach()
    assert tensor is not None  # noqa: S101 - this rank has told of it
    return tensor


def brought_to_owners(
    optimizer: NamedState, state_dict: Mapping[str, Any], names: Sequence[str]
) -> Mapping[str, Any]:
    """Return a state dict in which owners have what :func:`tell_all` has spread: a collective where there are owners.

    Args:
        optimizer: what will load it.
        state_dict: what is loaded; it is not changed.
        names: of its parameters, in the order of its groups.

    Raises:
        StateDictError: ranks do not load the same.
    """
    indices = [index for group in state_dict["param_groups"] for index in group["params"]]
    index_of = dict(zip(names, indices, strict=False))
    state = dict(state_dict["state"])
    for part, group in _with_owners(optimizer):
        for name, values in _brought(optimizer, part, group, state, index_of).items():
            state[index_of[name]] = values
    return {**state_dict, "state": state}


def refused_together(optimizer: NamedState, failure: MegaoptError | None) -> None:
    """Raise on all ranks that share whole tensors if one of them cannot load: a collective where there are owners.

    Args:
        optimizer: what will load.
        failure: this rank's error.

    Raises:
        StateDictError: what another rank cannot load; this rank's own error is raised as it is.
    """
    told = [
        gather_objects(None if failure is None else str(failure), group, _WHAT)
        for _, group in _with_owners(optimizer)
    ]
    if failure is not None:
        raise failure
    for words in (each for of_group in told for each in of_group if each is not None):
        raise StateDictError(words)


def _brought(
    optimizer: NamedState,
    part: NamedPieces,
    group: ProcessGroup,
    state: Mapping[Any, Any],
    index_of: Mapping[str, Any],
) -> dict[str, dict[str, Any]]:
    """Return the states of a part's parameters as this rank loads them."""
    encoded, rows = dict[str, dict[str, Any]](), dict[str, torch.Tensor]()
    given: dict[str, tuple[str, _Parts]] = {}
    for name in [optimizer.names[param] for each in part.groups for param in each["params"]]:
        values = state.get(index_of.get(name))
        for key, value in values.items() if isinstance(values, Mapping) else ():
            inside: dict[str, torch.Tensor] = {}
            told = encode(value, inside, f"{name}.{key}") if _is_owned(part, key) else None
            if inside and all(_is_spread(tensor, group) for tensor in inside.values()):
                encoded.setdefault(name, {})[key] = told
                rows.update((where, local_tensor(tensor)) for where, tensor in inside.items())
                shapes = {where: _Parts(tuple(each.shape), each.dtype) for where, each in inside.items()}
                given.update((where, (name, parts)) for where, parts in shapes.items())
    arrived, owned = _arrived(given, rows, _boxes_of(optimizer, part), group)
    return {
        name: {
            **{key: value for key, value in state[index_of[name]].items() if key not in told},
            **({key: decode(one, arrived.__getitem__) for key, one in told.items()} if name in owned else {}),
        }
        for name, told in encoded.items()
    }


def _is_spread(tensor: torch.Tensor, group: ProcessGroup) -> bool:
    """Return whether a tensor is cut as :func:`tell_all` cuts."""
    if not is_dtensor(tensor):
        return False
    mesh: Any = tensor.device_mesh  # type: ignore[attr-defined] # of DTensors
    cuts: Any = tensor.placements  # type: ignore[attr-defined] # of DTensors
    ranks = torch.distributed.get_process_group_ranks(group)
    return mesh.mesh.tolist() == ranks and [cut.is_shard(0) for cut in cuts] == [True]


def _boxes_of(optimizer: NamedState, part: NamedPieces) -> dict[str, list[tuple[tuple[int, ...], Box]]]:
    """Return the shapes and boxes of the whole tensors of which this rank keeps states."""
    found: dict[str, list[tuple[tuple[int, ...], Box]]] = {}
    for piece in piece_states(optimizer):
        if piece.part is part and isinstance(piece, OwnedState) is part.sharded.steps_local_tensors:
            for _, shard in piece.members:
                found.setdefault(shard.name, []).append((shard.shape, shard.box))
    return found


def _arrived(
    given: Mapping[str, tuple[str, _Parts]],
    rows: Mapping[str, torch.Tensor],
    owned: Mapping[str, Sequence[tuple[tuple[int, ...], Box]]],
    group: ProcessGroup,
) -> tuple[dict[str, torch.Tensor], Mapping[str, Any]]:
    """Return the tensors that this rank keeps, flat where it keeps several boxes of one, and of which parameters."""
    from_all = gather_objects((given, owned), group, _WHAT)
    differing = sorted({where for told, _ in from_all for where in set(told.items()) ^ set(given.items())})
    if differing:
        raise StateDictError(
            f"ranks load different states, such as {differing[0][0]!r}: give all of them the same state dict",
            names=[name for _, (name, _) in differing],
        )
    arrived: dict[str, torch.Tensor] = {}
    for where, (name, parts) in sorted(given.items()):  # one order on all ranks
        boxes = move_boxes(
            [[held] for held in rows_of(parts.shape, group.size())],
            [
                [box if shape == parts.shape else whole(parts.shape) for shape, box in theirs.get(name, ())]
                for _, theirs in from_all
            ],
            partial(_all_of, rows[where]),
            rows[where].new_empty(0),
            group,
            _WHAT,
        )
        if boxes:
            arrived[where] = boxes[0] if len(boxes) == 1 else torch.cat([box.reshape(-1) for box in boxes])
    return arrived, owned
