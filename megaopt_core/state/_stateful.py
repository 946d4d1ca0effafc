"""An optimizer as torch.distributed.checkpoint knows it, for training loops that call it themselves."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from megaopt_core.errors import StateDictError
from megaopt_core.state._document import describe_optimizer
from megaopt_core.state._manifest import FORMAT_VERSION, Manifest, StoredTensor
from megaopt_core.state._pieces import PREFIX, collect_state, piece_states
from megaopt_core.state._ranks import Ranks
from megaopt_core.state._restore.group_settings import merge_groups
from megaopt_core.state._restore.piece import MAIN_PARAM, Member, PieceRestore
from megaopt_core.state._sources import MemorySource, read_values
from megaopt_core.state._values.codes import with_named_codes
from megaopt_core.state._values.sliced import SlicedTensor

if TYPE_CHECKING:
    from megaopt_core.optimizers._base import MegatronOptimizer

__all__ = ["OptimizerCheckpointState"]

_DESCRIPTION = "description"


class OptimizerCheckpointState:
    """The `Stateful` of an optimizer: `dcp.save({"model": model, "optim": optimizer.checkpoint_state()}, ...)`.

    Every state tensor is a slice of its parameter's logical state, so that any world size and strategy loads it.
    What torch itself does holds here: files are not replaced atomically, a load that fails may have written some
    tensors, and torch unpickles its own metadata. :func:`save_checkpoint` and :func:`load_checkpoint` are stricter.

    Args:
        optimizer: a built optimizer.

    Example:
        >>> import tempfile, torch, warnings
        >>> import torch.distributed.checkpoint as dcp
        >>> from megaopt_core import build_optimizer
        >>> optimizer = build_optimizer(torch.nn.Linear(2, 2), "adam", lr=1e-3)
        >>> with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        ...     warnings.simplefilter("ignore")  # torch remarks that there is one process only
        ...     _ = dcp.save({"optim": optimizer.checkpoint_state()}, checkpoint_id=folder, no_dist=True)
        ...     dcp.load({"optim": optimizer.checkpoint_state()}, checkpoint_id=folder, no_dist=True)
    """

    def __init__(self, optimizer: MegatronOptimizer) -> None:
        self._optimizer = optimizer

    def state_dict(self) -> dict[str, Any]:
        """Return slices by parameter name and state key, and everything else as one JSON string: a collective."""
        collected = collect_state(self._optimizer, with_placeholders=True)
        tensors: dict[str, torch.Tensor] = dict(collected.tensors)
        described = describe_optimizer(self._optimizer, collected, tensors, Ranks())
        state = {key.removeprefix(f"{PREFIX}."): _writable(tensor) for key, tensor in tensors.items()}
        return {"state": state, _DESCRIPTION: json.dumps({"version": FORMAT_VERSION, **described})}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over what was read into the result of :meth:`state_dict`.

        Args:
            state_dict: that result.

        Raises:
            StateDictError: it is not such a result, or belongs to other parameters.
        """
        if set(state_dict) != {"state", _DESCRIPTION}:
            raise StateDictError(
                f"a checkpoint state has the keys 'state' and {_DESCRIPTION!r}, got {sorted(state_dict)}"
            )
        described = json.loads(state_dict[_DESCRIPTION])
        if "version" not in described:  # what format 1 did not say
            described["parameters"] = with_named_codes(described["parameters"])
        tensors = {_full_key(key): tensor for key, tensor in state_dict["state"].items()}
        source = _SliceSource("the checkpoint", Manifest(optimizer=described), tensors)
        records: Mapping[str, Any] = described["parameters"]
        names = [name for name in self._optimizer.names.values() if name not in records]
        if names:
            raise StateDictError(f"the checkpoint has no state of {', '.join(names)}", names=names)
        restores = []
        for piece in piece_states(self._optimizer):
            members = []
            for offset, shard in piece.members:
                state = dict(records[shard.name]["state"])
                main = state.pop(MAIN_PARAM, {}).get("tensor")
                members.append(Member(offset, shard, state, main, "fresh" in records[shard.name]))
            restores.append(PieceRestore(piece, members, source))
        for restore in restores:
            restore.plan()
        merge_groups(
            self._optimizer, records, described["groups"], lambda key: read_values(source, {"$tensor": key})
        ).apply(self._optimizer)
        with torch.no_grad():
            for restore in restores:
                source.read(restore.requests)
                for final in restore.finals:
                    final()
        scaler = read_values(source, described["scaler"])
        if scaler is not None and self._optimizer.grad_scaler is not None:
            self._optimizer.grad_scaler.load_state_dict(scaler)


def _full_key(key: str) -> str:
    return key if key.startswith("optim.") else f"{PREFIX}.{key}"


def _writable(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.read_once() if isinstance(tensor, SlicedTensor) else tensor


class _SliceSource(MemorySource):
    """Slices in memory: what this rank needs of each tensor, cut as this rank cuts it."""

    def stored(self, key: str) -> StoredTensor:
        """Return shape and dtype of a tensor.

        Args:
            key: its key.

        Raises:
            StateDictError: there was no place to read it into.
        """
        if key not in self.tensors:
            raise StateDictError(
                f"{self.name} holds {key!r}, which this optimizer has no place for before its first step: step once "
                "before dcp.load, or use load_checkpoint, which makes state from what was saved"
            )
        return super().stored(key)

    def read(self, requests: Any) -> None:
        """Copy slices into places of the same boxes, unless they are the same memory.

        Args:
            requests: `(key, place)` pairs.
        """
        for key, place in requests:
            held = self.tensors[key]
            if not isinstance(place, SlicedTensor) or not isinstance(held, SlicedTensor):
                place.copy_(held)
                continue
            boxes = {(chunk.offsets, chunk.sizes): index for index, chunk in enumerate(held.chunks)}
            for index, chunk in enumerate(place.chunks):
                target, value = place.local(index), held.local(boxes[chunk.offsets, chunk.sizes])
                if target.data_ptr() != value.data_ptr():
                    target.copy_(value)
