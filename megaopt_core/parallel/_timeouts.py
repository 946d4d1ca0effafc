"""How long ranks wait for each other: groups of ours wait as long as those of the run."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["timeout_of"]


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
