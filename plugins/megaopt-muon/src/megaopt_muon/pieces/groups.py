"""The tensor-parallel process groups inside whatever a caller passes as `pg_collection`, and which one cuts what."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megaopt_core.errors import ParallelGroupError
from megaopt_core.parallel import ProcessGroupCollection, size_of
from megaopt_muon.pieces.plans import is_expert, partition_dim_of

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

__all__ = ["group_of", "tensor_parallel_groups"]


def tensor_parallel_groups(pg_collection: Any | None) -> tuple[ProcessGroup | None, ProcessGroup | None]:
    """Return the tensor-parallel groups of dense and of expert parameters.

    Where `expt_tp` is not given, experts are cut like everything else, over `tp`.

    Args:
        pg_collection: an object with attributes `tp` and `expt_tp`, a mapping, a DeviceMesh, or None for none.

    Example:
        >>> tensor_parallel_groups(None)
        (None, None)
    """
    if pg_collection is None:
        return None, None
    groups = ProcessGroupCollection.of(pg_collection)
    return groups.tensor_parallel(), groups.tensor_parallel(is_expert=True)


def group_of(
    param: torch.Tensor, dense: ProcessGroup | None, expert: ProcessGroup | None, mode: str
) -> ProcessGroup | None:
    """Return the group that a parameter is cut over, if it is cut; None for this process alone.

    Args:
        param: the tensor that is stepped.
        dense: tensor-parallel group of dense parameters.
        expert: the same of expert parameters.
        mode: `"blockwise"`, which needs no group, `"duplicated"` or `"distributed"`.

    Raises:
        ParallelGroupError: a dense parameter is cut, but only the experts' group is known.
    """
    if is_expert(param):
        return expert
    if dense is None and size_of(expert) > 1 and partition_dim_of(param) >= 0 and mode != "blockwise":
        name = getattr(getattr(param, "param_info", None), "name", f"of shape {tuple(param.shape)}")
        raise ParallelGroupError(
            f"parameter {name} has partition_dim={partition_dim_of(param)} and is no expert's, but pg_collection holds "
            f"expt_tp ({size_of(expert)} ranks) and no tp; give tp too (a group of one rank if dense parameters are "
            "whole)"
        )
    return dense
