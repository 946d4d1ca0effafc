"""The model's part of a load: matched by name, planned whole, then written."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from attrs import define, field

from megaopt_checkpoint.ranks import Ranks
from megaopt_checkpoint.restore.fitting import require_tensors
from megaopt_checkpoint.restore.matching import LoadedBeside
from megaopt_checkpoint.restore.source import Request, Source, read_values
from megaopt_core.config import dtype_name
from megaopt_core.errors import CheckpointMismatchError
from megaopt_core.state import load_or_restore, named_errors, require_same_shapes

if TYPE_CHECKING:
    from megaopt_checkpoint.model_tensors import ModelTensors
    from megaopt_checkpoint.renaming import NameTable
    from megaopt_core.optimizers import MegatronOptimizer

__all__ = ["ModelRestore"]

_LOW_PRECISION = ("bfloat16", "float16")


@define
class ModelRestore:
    """What a load writes into a model.

    Args:
        source: what is loaded.
        model: the model's tensors.
        optimizer: who keeps main values of them, or None.
        names: how the checkpoint calls what is here.
        keys: tensor here to the key of its value in the checkpoint.
        here: tensors that some rank has.
        requests: `(key, place)` of each tensor; planned.
        objects: modules and their extra state; planned.
    """

    source: Source
    model: ModelTensors
    optimizer: MegatronOptimizer | None
    names: NameTable
    keys: Mapping[str, str]
    here: frozenset[str]
    requests: list[Request] = field(factory=list)
    objects: list[tuple[torch.nn.Module, Any]] = field(factory=list)

    @classmethod
    def match(
        cls,
        source: Source,
        model: ModelTensors,
        optimizer: MegatronOptimizer | None,
        names: NameTable,
        ranks: Ranks,
    ) -> ModelRestore:
        """Compare names and shapes: a collective; nothing is changed.

        Args:
            source: what is loaded.
            model: the model's tensors.
            optimizer: who keeps main values of them, or None.
            names: how the checkpoint calls what is here.
            ranks: who loads.

        Raises:
            CheckpointMismatchError: something does not fit.
        """
        stored: Mapping[str, str] = source.manifest.model.get("tensors", {})
        if not stored:
            raise CheckpointMismatchError(
                f"{source.name} was saved without a model; load it with model=None", path=source.name
            )
        found = {name: names.find(name, stored) for name in model.tensors}
        keys = {name: stored[there] for name, there in found.items() if there is not None}
        ranks.agree(lambda: _check_shapes(source, model, keys))
        here = frozenset[str]().union(*ranks.gather(set(model.tensors)))
        return cls(source, model, optimizer, names, keys, here)

    def beside(self) -> LoadedBeside:
        """Return what the load of the optimizer asks about the model."""
        stored: Mapping[str, str] = self.source.manifest.model["tensors"]
        used = {name: self.names.find(name, stored) for name in sorted(self.here)}
        return LoadedBeside(
            find=self.names.find,
            main_keys=self.keys,
            missing=tuple(name for name, there in used.items() if there is None),
            unexpected=tuple(sorted(set(stored) - set(used.values()))),
        )

    def plan(self) -> dict[str, str]:
        """Find out what is read into which place.

        Returns:
            Tensor to what becomes of its precision, where that changes.
        """
        converted = {}
        for name, key in self.keys.items():
            place = self.model.tensors[name]
            there, here = self.source.stored(key).dtype, dtype_name(place.dtype)
            if there != here:
                converted[name] = f"{there} -> {here}"
            main = self._main_key(name)
            # A parameter that is fp32 here and was not there is best read from its fp32 main parameter.
            low = here == "float32" and there in _LOW_PRECISION
            self.requests.append((main if main is not None and low else key, place))
        require_tensors(self.source, self.requests)
        stored = self.source.manifest.model.get("objects", {})
        for name, module in self.model.owners.items():
            saved_as = self.names.find(name, stored)
            if saved_as is not None:
                self.objects.append((module, read_values(self.source, stored[saved_as])))
        return converted

    def _main_key(self, name: str) -> str | None:
        parameters = self.source.manifest.parameters
        there = self.names.find(name, parameters)
        if there is None:
            return None
        key: str | None = parameters[there]["state"].get("main_param", {}).get("tensor")
        return key

    def write_settings(self, undo: list[Callable[[], None]]) -> None:
        """Give modules their extra state.

        Args:
            undo: receives what takes it back.
        """
        for module, value in self.objects:
            with named_errors(self.source.name, f"{type(module).__name__} does not take its extra state"):
                undo.append(load_or_restore(module.set_extra_state, value, module.get_extra_state()))

    def write(self) -> None:
        """Read the model's tensors into their places, and bring them to the pieces that are stepped."""
        self.source.read(self.requests)
        if self.optimizer is not None and self.requests:
            for part in self.optimizer.parts:
                part.sharded.take_model_values()
                part.writes.record()


def _check_shapes(source: Source, model: ModelTensors, keys: Mapping[str, str]) -> None:
    shapes = {
        name: (source.stored(key).shape, tuple(model.tensors[name].shape)) for name, key in keys.items()
    }
    require_same_shapes(source.name, {name: both for name, both in shapes.items() if both[0] != both[1]})
