"""How long ranks wait for each other: groups of ours wait as long as those of the run."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

import torch.distributed as dist

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["limit_waiting", "timeout_of"]


def timeout_of(group: ProcessGroup) -> timedelta | None:
    """Return how long a group waits for its ranks; None when its backend does not say.

    Args:
        group: a process group.
    """
    for device in group._device_types:
        options = getattr(group._get_backend(device), "options", None)
        timeout: timedelta | None = getattr(options, "_timeout", None)
        if timeout is not None:
            return timeout
    return None


def limit_waiting(group: ProcessGroup) -> None:
    """Let a group wait as long as the default group does, where it was made without a word about that.

    Args:
        group: one that torch has made of several dimensions of a mesh.
    """
    run = None if dist.group.WORLD is None else timeout_of(dist.group.WORLD)
    if run is None or timeout_of(group) != dist.default_pg_timeout:
        return
    # torch 2.15 has given the function a public name.
    set_timeout = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout
    set_timeout(run, group)
