"""Checks of wrapped chunks when an optimizer is built: what was planned, what overlaps, and where gradients lie."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

import torch
from attrs import evolve

from megaopt_core.errors import ConfigurationError, ShardingError
from megaopt_core.params import named_params
from megaopt_core.sharding import wrappers_of

if TYPE_CHECKING:
    from megaopt_core import OptimizerConfig
    from megaopt_core.routing import NameMap, Routing
    from megaopt_core.sharding import BufferKey, PerBufferParamLayout, WrappedModel

__all__ = ["checked_buffers"]


def checked_buffers(
    chunks: Sequence[torch.nn.Module], routing: Routing, config: OptimizerConfig, fqn: NameMap | None
) -> dict[BufferKey, PerBufferParamLayout] | None:
    """Return the layouts of the buffers that gradients are scattered into, by global names; None when there are none.

    Args:
        chunks: the model chunks.
        routing: what `route` returned for them.
        config: the optimizer's configuration.
        fqn: maps `(chunk index, local name)` to a globally unique name.

    Raises:
        RoutingChangedError: the model is routed otherwise than when the buffers were planned.
        ConfigurationError: `overlap_param_gather` has one value here and another in a chunk's wrapper.
        ShardingError: some chunks are wrapped that way and others are not, or a chunk has several wrappers or not all
            that is in its wrapper.
    """
    _require_as_planned(chunks, routing, fqn)
    _require_same_overlap(chunks, config)
    return wrapped_buffers(chunks, fqn)


def _require_as_planned(chunks: Sequence[torch.nn.Module], routing: Routing, fqn: NameMap | None) -> None:
    """Raise unless a model is routed as it was when the buffers of its wrappers were planned."""
    wrappers: dict[int, tuple[int, WrappedModel]] = {}
    for index, chunk in enumerate(chunks):
        for wrapper in wrappers_of([chunk]):
            wrappers.setdefault(id(wrapper), (index, wrapper))
    for index, wrapper in wrappers.values():
        planned = wrapper.full_param_layout.routing
        if planned is None:
            continue
        names: dict[str, str] = {}
        if not routing.params.keys() >= planned.params.keys():  # planned without what holds the wrapper
            there = _names_in(index, chunks[index], wrapper, fqn)
            names = {fqn(index, old) if fqn else old: new for old, new in there.items()}
        planned.require_same(routing, names)


def wrapped_buffers(
    chunks: Sequence[torch.nn.Module], fqn: NameMap | None
) -> dict[BufferKey, PerBufferParamLayout] | None:
    """Return the layouts of the buffers that gradients are scattered into, by global names; None when there are none.

    Args:
        chunks: the model chunks.
        fqn: maps `(chunk index, local name)` to a globally unique name.

    Raises:
        ShardingError: some chunks are wrapped that way and others are not, or a chunk has several wrappers or not all
            that is in its wrapper.
    """
    found = [wrappers_of([chunk]) for chunk in chunks]
    sharing = [[wrapper for wrapper in wrappers if wrapper.scatters_grads] for wrappers in found]
    if not any(sharing):
        return None
    if not all(sharing):
        raise ShardingError(
            f"model chunks {[index for index, some in enumerate(sharing) if not some]} are not wrapped in "
            "DistributedDataParallel with use_distributed_optimizer=True, but the others are; wrap all or "
            "none"
        )
    buffers = {}
    for index, (chunk, wrappers) in enumerate(zip(chunks, found, strict=True)):
        if len(wrappers) > 1:
            raise ShardingError(
                f"{len(wrappers)} wrappers reduce gradients of model chunk {index}, and "
                f"{len(sharing[index])} of them scatter gradients over ranks "
                "(use_distributed_optimizer=True): give the optimizer a list with each wrapper as a chunk "
                "of its own"
            )
        names = _names_in(index, chunk, wrappers[0], fqn)
        for key, buffer in wrappers[0].full_param_layout.buffers.items():
            buffers[evolve(key, chunk=index)] = evolve(
                buffer,
                param_ranges={names[name]: where for name, where in buffer.param_ranges.items()},
                bucket_of={names[name]: bucket for name, bucket in buffer.bucket_of.items()},
            )
    return buffers


def _names_in(
    index: int, chunk: torch.nn.Module, wrapper: WrappedModel, fqn: NameMap | None
) -> dict[str, str]:
    """Return the global names of the parameters in a wrapper's buffers, by the names that the wrapper has for them."""
    names = [name for buffer in wrapper.full_param_layout.buffers.values() for name in buffer.param_ranges]
    if id(chunk) == id(wrapper):
        local = dict(zip(names, names, strict=True))
    else:
        name_of = {
            param: entry.name for entry in named_params(chunk) for param in (entry.param, *entry.twins)
        }
        theirs = {entry.name: entry.param for entry in named_params(cast("torch.nn.Module", wrapper))}
        local = {name: name_of[theirs[name]] for name in names if theirs.get(name) in name_of}
    lacking = [name for name in names if name not in local]
    if lacking:
        raise ShardingError(
            f"{type(wrapper).__name__} shares out gradients of {len(lacking)} parameters that model chunk "
            f"{index} does not have: {', '.join(lacking[:5])}. Build the optimizer for the wrapper, and "
            "exclude the parameters that it must not step"
        )
    return {name: fqn(index, here) if fqn else here for name, here in local.items()}


def _require_same_overlap(chunks: Sequence[torch.nn.Module], config: OptimizerConfig) -> None:
    """Raise unless the optimizer leaves waiting for parameters to forward hooks exactly where wrapping has put them."""
    asked = config.overlap_param_gather
    for index, chunk in enumerate(chunks):
        found = wrappers_of([chunk])
        if all(wrapper.forward_waits is asked for wrapper in found) and (found or not asked):
            continue
        if any(wrapper.scatters_grads for wrapper in found):
            reason = f"is wrapped with overlap_param_gather={not asked}; give all chunks and the optimizer one value"
        else:
            reason = (
                "is not wrapped in DistributedDataParallel(use_distributed_optimizer=True), whose forward hooks wait "
                "for parameters; leave it out"
            )
        raise ConfigurationError(
            f"overlap_param_gather={asked}, but model chunk {index} {reason}",
            setting="overlap_param_gather",
            value=asked,
        )
