"""An optimizer as torch.distributed.checkpoint knows it, for training loops that call it themselves."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from megaopt_checkpoint.collected import PREFIX, collect_state
from megaopt_checkpoint.description import read_description
from megaopt_checkpoint.document import describe_optimizer, require_own_names, versions
from megaopt_checkpoint.ranks import Ranks
from megaopt_checkpoint.restore.plan import plan_load
from megaopt_checkpoint.restore.source import MemorySource
from megaopt_checkpoint.stored import FORMAT_VERSION, Manifest, StoredTensor
from megaopt_checkpoint.values.sliced import SlicedTensor
from megaopt_core.errors import CheckpointMismatchError, StateDictError
from megaopt_core.state import optimizer_names, plugins_of

if TYPE_CHECKING:
    from megaopt_core.optimizers import MegatronOptimizer

__all__ = ["OptimizerCheckpointState"]

_DESCRIPTION = "description"
_NAME = "the checkpoint"


class OptimizerCheckpointState:
    """The `Stateful` of an optimizer: `dcp.save({"model": model, "optim": optimizer.checkpoint_state()}, ...)`.

    Every state tensor is a slice of its parameter's logical state, so that any world size and strategy loads it.
    What torch itself does holds here: files are not replaced atomically, torch may have read some tensors straight into
    their places before a load fails, and it unpickles its own metadata. :func:`save_checkpoint` and
    :func:`load_checkpoint` are stricter.

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
        with self._optimizer.step_lock.saving():
            collected = collect_state(self._optimizer, with_placeholders=True)
        tensors: dict[str, torch.Tensor] = dict(collected.tensors)
        named = {name: param for param, name in self._optimizer.names.items()}
        require_own_names(self._optimizer, named, Ranks())
        described = describe_optimizer(self._optimizer, collected, tensors, Ranks())
        state = {
            key.removeprefix(f"{PREFIX}."): tensor.read_once() if isinstance(tensor, SlicedTensor) else tensor
            for key, tensor in tensors.items()
        }
        about = {
            "version": FORMAT_VERSION,
            "plugins": plugins_of(optimizer_names(self._optimizer).values()),
            "written": versions(self._optimizer),
        }
        return {"state": state, _DESCRIPTION: json.dumps({**about, **described})}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over what was read into the result of :meth:`state_dict`.

        Args:
            state_dict: that result.

        Raises:
            StateDictError: it is not such a result, or belongs to other parameters.
            CheckpointVersionError: a newer version of megaopt wrote it.
            CheckpointCorruptError: its description is damaged.
        """
        if not isinstance(state_dict, Mapping) or set(state_dict) != {"state", _DESCRIPTION}:
            given = [*state_dict] if isinstance(state_dict, Mapping) else type(state_dict).__name__
            raise StateDictError(f"a checkpoint state has the keys 'state' and {_DESCRIPTION!r}, got {given}")
        if not isinstance(state_dict["state"], Mapping):
            kind = type(state_dict["state"]).__name__
            raise StateDictError(f"'state' of a checkpoint state maps names to tensors, got {kind}")
        described = read_description(_NAME, state_dict[_DESCRIPTION])
        kept = {key: described.pop(key) for key in ("plugins", "written") if key in described}
        tensors = {
            key if key.startswith("optim.") else f"{PREFIX}.{key}": tensor
            for key, tensor in state_dict["state"].items()
        }
        source = _PlacesSource(_NAME, Manifest(optimizer=described, **kept), tensors)
        ranks = Ranks()
        plan_load(source, self._optimizer, strict=True, ranks=ranks).apply(ranks)


class _PlacesSource(MemorySource):
    """What torch has read into the places that :meth:`OptimizerCheckpointState.state_dict` gave it."""

    def stored(self, key: str) -> StoredTensor:
        """Return shape and dtype of a tensor.

        Args:
            key: its key.

        Raises:
            CheckpointMismatchError: there was no place to read it into.
        """
        if key not in self.tensors:
            raise CheckpointMismatchError(
                f"{self.name} holds {key!r}, and this optimizer has no place for it, before its first step or for a "
                "frozen parameter: step once before dcp.load, freeze after it, or use load_checkpoint, which makes "
                "state from the saved one and keeps it"
            )
        return super().stored(key)
