"""The tensor-parallel process groups inside whatever a caller passes as `pg_collection`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megaopt_core.parallel.groups import ProcessGroupCollection

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["tensor_parallel_groups"]


def tensor_parallel_groups(pg_collection: Any | None) -> tuple[ProcessGroup | None, ProcessGroup | None]:
    """Return the tensor-parallel groups of dense and of expert parameters.

    Args:
        pg_collection: an object with attributes `tp` and `expt_tp`, a mapping, a DeviceMesh, or None for none.

    Example:
        >>> tensor_parallel_groups(None)
        (None, None)
    """
    if pg_collection is None:
        return None, None
    groups = ProcessGroupCollection.of(pg_collection)
    return groups.tp, groups.expt_tp
