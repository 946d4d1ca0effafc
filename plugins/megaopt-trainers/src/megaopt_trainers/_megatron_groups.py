"""The process groups of a model of Megatron-core's: its own `pg_collection` first, then `parallel_state`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from megaopt_core import ProcessGroupCollection
from megaopt_core.errors import ParallelGroupError
from megaopt_core.parallel import size_of

__all__ = ["groups_from", "groups_of_megatron", "is_megatron"]

_SHARED = (
    "tp",
    "pp",
    "cp",
    "dp",
    "dp_cp",
    "mp",
    "ep",
    "expt_tp",
    "expt_dp",
    "tp_ep_pp",
    "intra_dist_opt",
    "inter_dist_opt",
)
"""Fields that mean the same in Megatron's collection and in ours."""

_PARTS = {"intra_dp_cp": "dp_cp", "intra_expt_dp": "expt_dp"}
"""Fields that name the whole group where there is one instance of a distributed optimizer; ours say None then."""

_SHARDED_WEIGHTS = ("gtp_remat", "expt_gtp_remat")
"""Groups over which Megatron cuts weights and gathers them for each use."""


def is_megatron(module: torch.nn.Module) -> bool:
    """Return whether a module's class is Megatron-core's, or is derived from one of its classes.

    Args:
        module: any module.
    """
    return any(base.__module__.partition(".")[0] == "megatron" for base in type(module).__mro__)


def groups_of_megatron(model_chunks: Sequence[torch.nn.Module]) -> ProcessGroupCollection | None:
    """Return the process groups of a model of Megatron's; None for another model, or where Megatron keeps none.

    Args:
        model_chunks: the model chunks, wrapped or bare.

    Raises:
        ParallelGroupError: Megatron keeps weights in shards that are gathered for each use.
    """
    if not any(is_megatron(module) for chunk in model_chunks for module in chunk.modules()):
        return None
    sources = [*_collections(model_chunks), *_of_parallel_state()]
    return groups_from(sources) if sources else None


def groups_from(sources: Sequence[Any]) -> ProcessGroupCollection:
    """Return process groups as ours: each from the first of several collections that has it.

    Args:
        sources: Megatron's collections, or one that :meth:`ProcessGroupCollection.of` takes.

    Raises:
        ParallelGroupError: Megatron keeps weights in shards that are gathered for each use.
    """
    if not any(type(source).__module__.startswith("megatron.") for source in sources):
        return ProcessGroupCollection.of(sources[0])
    found = {name: _first(sources, name) for name in (*_SHARED, *_PARTS, *_SHARDED_WEIGHTS)}
    for name in _SHARDED_WEIGHTS:
        if size_of(found.pop(name)) > 1:
            raise ParallelGroupError(
                f"Megatron keeps weights in shards over its group {name!r}, which are gathered for each use; no "
                "sharding strategy knows them. Build the model without generalized tensor parallelism"
            )
    for part, whole in _PARTS.items():
        if size_of(found[part]) == size_of(found[whole]):
            found[part] = None
    return ProcessGroupCollection(**found)


def _first(sources: Sequence[Any], name: str) -> Any:
    groups = (getattr(source, name, None) for source in sources)
    return next((group for group in groups if group is not None), None)


def _collections(model_chunks: Sequence[torch.nn.Module]) -> Iterator[Any]:
    """Yield what modules of a model keep as `pg_collection`, the outermost first."""
    for chunk in model_chunks:
        for module in chunk.modules():
            found = getattr(module, "pg_collection", None)
            if found is not None and is_megatron(module):
                yield found
                break


def _of_parallel_state() -> Iterator[Any]:
    """Yield the groups of Megatron's global state, where it has been initialised."""
    from megatron.core import parallel_state
    from megatron.core.process_groups_config import ProcessGroupCollection as Theirs

    if parallel_state.model_parallel_is_initialized():
        yield Theirs.use_mpu_process_groups()
