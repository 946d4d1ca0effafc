"""The model's tensors under canonical names: wrappers seen through, ties stored once, parallel parts put in place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from attrs import define, field

from megaopt_checkpoint.given import name_of_chunk
from megaopt_checkpoint.values.encoding import encode
from megaopt_checkpoint.values.sliced import sliced
from megaopt_core.errors import CheckpointError, CheckpointMismatchError, ConfigurationError
from megaopt_core.optimizers import MegatronOptimizer
from megaopt_core.params import named_modules, shown
from megaopt_core.sharding import wrappers_of

if TYPE_CHECKING:
    from megaopt_core.params import Shard
    from megaopt_core.routing import NameMap

__all__ = [
    "ModelTensors",
    "collect_model",
    "finish_param_sync",
    "model_key",
    "require_megaopt",
    "require_pair",
]


def model_key(name: str) -> str:
    """Return the key of a model tensor in a checkpoint.

    Args:
        name: canonical name.
    """
    return f"model.{name}"


def finish_param_sync(model: torch.nn.Module | Sequence[torch.nn.Module] | None) -> None:
    """Wait until parameters that are still being gathered after a step have arrived.

    Args:
        model: the model, its chunks, or None.
    """
    for wrapper in wrappers_of(_chunks(model)):
        wrapper.finish_param_sync()


def _chunks(model: torch.nn.Module | Sequence[torch.nn.Module] | None) -> list[torch.nn.Module]:
    if model is None:
        return []
    return [model] if isinstance(model, torch.nn.Module) else list(model)


@define
class ModelTensors:
    """What a model saves on this rank.

    Args:
        tensors: canonical name to tensor: the model's own, or the part of a logical tensor that it is.
        aliases: other names of tied tensors, to the name under which they are stored.
        objects: name of a module's extra state to its value.
        owners: name of a module's extra state to the module.
    """

    tensors: dict[str, torch.Tensor] = field(factory=dict)
    aliases: dict[str, str] = field(factory=dict)
    objects: dict[str, Any] = field(factory=dict)
    owners: dict[str, torch.nn.Module] = field(factory=dict)

    def describe(self, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
        """Return the model's part of the manifest, and put its tensors into `tensors`.

        Args:
            tensors: receives tensors by key.
        """
        for name, tensor in self.tensors.items():
            tensors[model_key(name)] = tensor
        objects = {name: encode(value, tensors, model_key(name)) for name, value in self.objects.items()}
        return {
            "tensors": {name: model_key(name) for name in self.tensors},
            "aliases": dict(self.aliases),
            "objects": objects,
        }


def collect_model(
    model: torch.nn.Module | Sequence[torch.nn.Module] | None,
    optimizer: MegatronOptimizer | None,
    fqn: NameMap | None = None,
) -> ModelTensors:
    """Return the parameters and persistent buffers of a model; nothing is copied.

    Args:
        model: the model or its chunks, wrapped or bare.
        optimizer: knows the globally unique names of its parameters and the parts of them that are here.
        fqn: maps `(chunk index, local name)` to a globally unique name, for buffers and frozen parameters too.

    Raises:
        CheckpointError: two chunks have different tensors of one name.
    """
    found = ModelTensors()
    names: Mapping[Any, str] = {} if optimizer is None else optimizer.names
    shards: dict[str, Shard] = {}
    if optimizer is not None and optimizer.routing is not None:
        shards = {name: entry.shard for name, entry in optimizer.routing.params.items()}
    seen: dict[int, str] = {}
    stored_ids: set[int] = set()
    for index, chunk in enumerate(_chunks(model)):
        for prefix, module in named_modules(chunk):
            for attribute, tensor in _own_tensors(module):
                local = f"{prefix}.{attribute}" if prefix else attribute
                local = name_of_chunk(fqn, index, local)
                name = names.get(tensor, local)
                stored = seen.setdefault(id(tensor), name)
                if local != stored:
                    found.aliases[local] = stored
                if stored in found.tensors and id(tensor) not in stored_ids:
                    raise CheckpointError(
                        f"two chunks of the model have a tensor {stored!r}; tell them apart with fqn="
                    )
                stored_ids.add(id(tensor))
                if stored not in found.tensors:
                    found.tensors[stored] = _logical(tensor.detach(), shards.get(stored))
            _collect_extra(found, f"{prefix}._extra_state" if prefix else "_extra_state", module, index, fqn)
    return found


def require_pair(
    model: torch.nn.Module | Sequence[torch.nn.Module] | None, optimizer: MegatronOptimizer | None
) -> None:
    """Require that an optimizer steps parameters of this model and of no other.

    Args:
        model: the model or its chunks; None: there is nothing to compare.
        optimizer: the optimizer, or None.

    Raises:
        CheckpointMismatchError: it steps others too.
    """
    if model is None or optimizer is None:
        return
    here = {id(param) for chunk in _chunks(model) for param in chunk.parameters()}
    others = [name for param, name in optimizer.names.items() if id(param) not in here]
    if others:
        raise CheckpointMismatchError(
            f"the optimizer steps parameters that are not in this model: {shown(others)}. Give the model, with all its "
            "chunks, that the optimizer was built for",
            names=others,
        )


def _own_tensors(module: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    buffers = {
        name: buffer
        for name, buffer in module._buffers.items()
        if name not in module._non_persistent_buffers_set
    }
    return [
        (name, tensor) for name, tensor in {**module._parameters, **buffers}.items() if tensor is not None
    ]


def _collect_extra(
    found: ModelTensors, local: str, module: torch.nn.Module, index: int, fqn: NameMap | None
) -> None:
    if type(module).get_extra_state is not torch.nn.Module.get_extra_state:
        name = name_of_chunk(fqn, index, local)
        if name not in found.objects:
            found.objects[name] = module.get_extra_state()
            found.owners[name] = module


def _logical(tensor: torch.Tensor, shard: Shard | None) -> torch.Tensor:
    """Return a tensor-parallel part as what it is a part of; DTensors say that themselves."""
    if shard is None or shard.is_whole or tuple(tensor.shape) != shard.box[1]:
        return tensor
    return sliced(shard, tensor.dtype, tensor.device, lambda: tensor.view(-1))


def require_megaopt(optimizer: object) -> None:
    """Raise unless an optimizer is one of megaopt's: files hold state by parameter name, which others do not know.

    Args:
        optimizer: what a user gave; None is none.

    Raises:
        ConfigurationError: it is something else.
    """
    if optimizer is None or isinstance(optimizer, MegatronOptimizer):
        return
    is_torchs = isinstance(optimizer, torch.optim.Optimizer)
    shown = f"the class {optimizer.__name__}" if isinstance(optimizer, type) else type(optimizer).__name__
    advice = (
        "build it with build_optimizer, wrap it in FP32Optimizer(optimizer, config), or save its own state_dict() as "
        "extra={...}"
        if is_torchs
        else "give the optimizer that build_optimizer returned, or None"
    )
    raise ConfigurationError.got("optimizer", optimizer, advice, shown=shown)
