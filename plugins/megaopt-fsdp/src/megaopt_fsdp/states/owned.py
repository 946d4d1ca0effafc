"""States that owners keep of whole tensors, as DTensors over all ranks that share these tensors; and back.

torch's functions for state dicts want the same keys on every rank. So an owner's tensors become DTensors, cut by rows
over the ranks among which owners were chosen, and all ranks are told its numbers; a load brings the rows back.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, MutableMapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from attrs import define, field, frozen
from megaopt_checkpoint import SlicedTensor, decode, encode

from megaopt_core.errors import CheckpointError, StateDictError
from megaopt_core.parallel import gather_objects
from megaopt_core.params import Box, Shard, is_dtensor, local_tensor, numel_of, whole
from megaopt_fsdp.states.boxes import move_boxes, rows_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["brought_to_owners", "tell_all"]

type _Keys = Collection[str] | None
"""State keys that owners keep; None: all of them."""

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


def tell_all(
    params: Mapping[str, torch.nn.Parameter],
    values: Mapping[str, MutableMapping[str, Any]],
    keys: _Keys,
    group: ProcessGroup,
) -> None:
    """Show on every rank what owners keep: a collective.

    Args:
        params: all parameters by name.
        values: what this rank exports of the state of each; changed in place.
        keys: what owners keep; None: everything.
        group: the ranks among which owners were chosen.

    Raises:
        StateDictError: several owners keep a state of one parameter which has not its shape, or a state is no tensor,
            number or plain value; on all ranks.
    """
    tensors: dict[str, torch.Tensor] = {}
    told = _Told()
    try:
        told.states = {name: _taken(name, values[name], keys, tensors) for name in params}
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


def _taken(
    name: str, values: MutableMapping[str, Any], keys: _Keys, tensors: dict[str, torch.Tensor]
) -> dict[str, Any]:
    """Take what owners keep out of a parameter's state, and return it encoded."""
    owned = [key for key in values if keys is None or key in keys]
    return {key: encode(values.pop(key), tensors, f"{name}.{key}") for key in owned}


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
    states: Mapping[str, Mapping[str, Any]],
    owned: Mapping[str, Sequence[Shard]],
    keys: _Keys,
    group: ProcessGroup,
) -> dict[str, dict[str, Any]]:
    """Return the states in which owners have what :func:`tell_all` has spread: a collective.

    Args:
        states: what a state dict has of each parameter.
        owned: the whole tensors of which this rank keeps states.
        keys: what owners keep; None: everything.
        group: the ranks among which owners were chosen.

    Raises:
        StateDictError: ranks load different states.
    """
    encoded, rows = dict[str, dict[str, Any]](), dict[str, torch.Tensor]()
    given: dict[str, tuple[str, _Parts]] = {}
    for name, values in states.items():
        for key, value in values.items():
            inside: dict[str, torch.Tensor] = {}
            told = encode(value, inside, f"{name}.{key}") if keys is None or key in keys else None
            if inside and all(_is_spread(tensor, group) for tensor in inside.values()):
                encoded.setdefault(name, {})[key] = told
                rows.update((where, local_tensor(tensor)) for where, tensor in inside.items())
                shapes = {where: _Parts(tuple(each.shape), each.dtype) for where, each in inside.items()}
                given.update((where, (name, parts)) for where, parts in shapes.items())
    boxes = {name: [(shard.shape, shard.box) for shard in shards] for name, shards in owned.items()}
    arrived = _arrived(given, rows, boxes, group)
    return {
        name: {
            **{key: value for key, value in states[name].items() if key not in told},
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


def _arrived(
    given: Mapping[str, tuple[str, _Parts]],
    rows: Mapping[str, torch.Tensor],
    owned: Mapping[str, Sequence[tuple[tuple[int, ...], Box]]],
    group: ProcessGroup,
) -> dict[str, torch.Tensor]:
    """Return the tensors that this rank keeps, flat where it keeps several boxes of one."""
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
    return arrived
