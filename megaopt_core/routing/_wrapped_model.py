"""Questions to wrapped chunks: over which ranks they reduce gradients, and whether these lie in buffers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from attrs import evolve

from megaopt_core.config._optimizer_config import OptimizerConfig
from megaopt_core.errors import ParallelGroupError
from megaopt_core.parallel._groups import ProcessGroupCollection
from megaopt_core.registry._catalogue import BUFFERS
from megaopt_core.registry._missing import import_distribution
from megaopt_core.routing._process_groups import find_process_groups, ranks_of
from megaopt_core.routing._routing import NameMap, Routing
from megaopt_core.sharding._layout import BufferKey, PerBufferParamLayout
from megaopt_core.sharding._wrapped import WrappedModel, wrappers_of

__all__ = ["checked_buffers", "groups_of_wrapped", "require_same_ranks"]


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
                f"model chunk {index} is wrapped over other ranks than the optimizer: {whose} data-parallel ranks "
                f"{ranks_of(theirs)} and {ranks_of(mine)}. Pass the same pg_collection to both, or leave it out here"
            )


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
        PluginNotInstalledError: there are buffers to check, and megaopt-distributed is not installed.
        MegaoptError: what it refuses: buffers, a plan or an overlap that do not fit the optimizer.
    """
    in_buffers = [wrapper for wrapper in wrappers_of(chunks) if wrapper.full_param_layout.buffers]
    if not in_buffers and not config.overlap_param_gather:
        return None
    what = (
        f"the check of buffers of {type(in_buffers[0]).__name__}"
        if in_buffers
        else "overlap_param_gather=True"
    )
    found: dict[BufferKey, PerBufferParamLayout] | None = import_distribution(BUFFERS, what).checked_buffers(
        chunks, routing, config, fqn
    )
    return found
