"""The process groups of a model for which neither a caller nor a wrapper of ours names any."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from attrs import asdict

from megaopt_core.errors import MegaoptError, ParallelGroupError, PluginHookError
from megaopt_core.parallel._groups import ProcessGroupCollection, size_of
from megaopt_core.params._parts import groups_of_model
from megaopt_core.registry._registry import get_registry

__all__ = ["find_process_groups", "ranks_of"]


def find_process_groups(chunks: Sequence[torch.nn.Module]) -> ProcessGroupCollection:
    """Return the groups that a model's trainer keeps, else those of its DTensors' mesh, else the default group's.

    Args:
        chunks: the model chunks.

    Raises:
        ParallelGroupError: two plugins give different groups, or a plugin gives something else.
        PluginHookError: a plugin's hook failed.
    """
    try:
        answers = get_registry().call_each("megaopt_process_groups", model_chunks=chunks)
    except PluginHookError as error:
        raise error.__cause__ if isinstance(error.__cause__, MegaoptError) else error from None
    found: list[tuple[str, ProcessGroupCollection]] = []
    for plugin, answer in answers:
        try:
            found.append((str(plugin), ProcessGroupCollection.of(answer)))
        except ParallelGroupError as error:
            raise ParallelGroupError(f"{plugin}: megaopt_process_groups returned: {error}") from error
    for name, pgs in found[1:]:
        first, theirs, mine = found[0][0], _by_name(found[0][1]), _by_name(pgs)
        differing = [field for field, ranks in mine.items() if ranks != theirs[field]]
        if differing:
            field = differing[0]
            raise ParallelGroupError(
                f"{first} and {name} give different process groups of one model: {field} is {theirs[field]} "
                f"and {mine[field]}. Pass pg_collection, or block one plugin by MEGAOPT_DISABLE_PLUGINS"
            )
    return found[0][1] if found else groups_of_model(chunks)


def _by_name(pgs: ProcessGroupCollection) -> dict[str, list[int]]:
    return {name: ranks_of(group) for name, group in asdict(pgs, recurse=False).items()}


def ranks_of(group: dist.ProcessGroup | None) -> list[int]:
    """Return the ranks of a group; none for a group of one rank, which is as good as no group.

    Args:
        group: a process group, or None for this process alone.
    """
    return [] if group is None or size_of(group) == 1 else dist.get_process_group_ranks(group)
