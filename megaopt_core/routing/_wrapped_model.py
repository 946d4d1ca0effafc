"""What is to be known of chunks that `DistributedDataParallel` wraps: process groups, buffers, and what was planned."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import cast

import torch
from attrs import evolve

from megaopt_core.config._optimizer_config import OptimizerConfig
from megaopt_core.errors import ConfigurationError, ParallelGroupError, ShardingError
from megaopt_core.parallel._groups import ProcessGroupCollection
from megaopt_core.params._names import named_params
from megaopt_core.routing._process_groups import find_process_groups, ranks_of
from megaopt_core.routing._routing import NameMap, Routing
from megaopt_core.sharding._layout import BufferKey, PerBufferParamLayout
from megaopt_core.sharding._wrapped import WrappedModel, wrappers_of

__all__ = [
    "groups_of_wrapped",
    "require_as_planned",
    "require_same_overlap",
    "require_same_ranks",
    "wrapped_buffers",
]


def groups_of_wrapped(
    chunks: Sequence[torch.nn.Module], pgs: ProcessGroupCollection | None
) -> ProcessGroupCollection:
    """Return the process groups of a model: the caller's, and what only its wrapper knows.

    Args:
        chunks: the model chunks.
        pgs: the caller's process groups; None: the wrapper's; where no chunk has one of ours, those that its
            trainer keeps, of the mesh that its DTensors lie on, or the default group.

    Raises:
        ParallelGroupError: a wrapper reduces gradients over other ranks than the caller's groups name.
    """
    for index, wrapper in _each(chunks):
        made = wrapper.process_groups
        if pgs is None:
            pgs = made
        require_same_ranks(index, wrapper, pgs)
        if made.intra_dp_cp is not None and pgs.intra_dp_cp is None:
            pgs = evolve(
                pgs,
                intra_dp_cp=made.intra_dp_cp,
                intra_expt_dp=made.intra_expt_dp,
                inter_dist_opt=made.inter_dist_opt,
                inter_expt_dist_opt=made.inter_expt_dist_opt,
                intra_dist_opt=made.intra_dist_opt,
            )
    return find_process_groups(chunks) if pgs is None else ProcessGroupCollection.of(pgs)


def _each(chunks: Sequence[torch.nn.Module]) -> Iterator[tuple[int, WrappedModel]]:
    """Yield every wrapper with the index of the first chunk whose gradients it reduces."""
    seen: set[int] = set()
    for index, chunk in enumerate(chunks):
        for wrapper in wrappers_of([chunk]):
            if id(wrapper) not in seen:
                seen.add(id(wrapper))
                yield index, wrapper


def require_same_ranks(index: int, wrapper: WrappedModel, given: ProcessGroupCollection) -> None:
    """Raise unless a wrapper reduces gradients over the ranks that an optimizer is built for.

    Args:
        index: which chunk's wrapper it is.
        wrapper: the wrapper.
        given: the optimizer's process groups.

    Raises:
        ParallelGroupError: it reduces them over others.
    """
    made = wrapper.process_groups
    pairs = [
        ("dense", given.dense_dp, made.dense_dp),
        ("one instance's", given.intra_dp_cp, made.intra_dp_cp),
    ]
    if any(key.is_expert for key in wrapper.full_param_layout.buffers):
        pairs += [
            ("expert", given.expt_dp, made.expt_dp),
            ("one instance's expert", given.intra_expt_dp, made.intra_expt_dp),
        ]
    for whose, mine, theirs in pairs:
        only_wrapping_made_it = mine is None and whose.startswith("one instance")
        if not only_wrapping_made_it and ranks_of(mine) != ranks_of(theirs):
            raise ParallelGroupError(
                f"model chunk {index} is wrapped over other ranks than the optimizer: {whose} data-parallel "
                f"ranks {ranks_of(theirs)} and {ranks_of(mine)}. Pass the same pg_collection to both, or "
                "leave it out here"
            )


def require_as_planned(chunks: Sequence[torch.nn.Module], routing: Routing, fqn: NameMap | None) -> None:
    """Raise unless a model is routed as it was when the buffers of its wrappers were planned.

    Args:
        chunks: the model chunks.
        routing: what `route` returned.
        fqn: maps `(chunk index, local name)` to a globally unique name.

    Raises:
        RoutingChangedError: it is routed otherwise.
    """
    for index, wrapper in _each(chunks):
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


def require_same_overlap(chunks: Sequence[torch.nn.Module], config: OptimizerConfig) -> None:
    """Raise unless the optimizer leaves waiting for parameters to forward hooks exactly where wrapping has put them.

    Args:
        chunks: the model chunks.
        config: the optimizer's configuration.

    Raises:
        ConfigurationError: `overlap_param_gather` has one value here and another in a chunk's wrapper.
    """
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
