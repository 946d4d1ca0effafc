"""Which part of a logical tensor a rank's parameter is: attributes say it, or the placements of a DTensor."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from attrs import evolve, frozen

from megaopt_core.errors import RoutingError, ShardingError
from megaopt_core.parallel.groups import ProcessGroupCollection, rank_in, size_of
from megaopt_core.params.specs import Box, Shard, whole

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.tensor.placement_types import Placement

    from megaopt_core.params.routing import Routing

__all__ = ["LogicalPart", "is_dtensor", "local_box", "local_tensor", "logical_part", "shard_elements"]


@frozen
class LogicalPart:
    """A rank's part of a logical tensor.

    Args:
        shape: of the logical tensor over all tensor-parallel ranks.
        box: this rank's part of `shape`.
        tensor_parallel: it is cut over the tensor-parallel group, not the same on all its ranks.
        partition_dim: dimension that tensor parallelism cuts; -1 for none.
        dp_placements: of a DTensor: `(placement, mesh size)` of every mesh dimension that is not tensor parallel.
    """

    shape: tuple[int, ...]
    box: Box
    tensor_parallel: bool = False
    partition_dim: int = -1
    dp_placements: tuple[tuple[Placement, int], ...] = ()


def is_dtensor(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is a DTensor.

    Args:
        tensor: any tensor.
    """
    return hasattr(tensor, "placements") and hasattr(tensor, "device_mesh")


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return what this rank holds of a tensor, sharing its memory: the tensor itself unless it is a DTensor.

    Args:
        tensor: any tensor.
    """
    if not is_dtensor(tensor):
        return tensor
    local: torch.Tensor = tensor.detach().to_local()  # type: ignore[attr-defined] # of DTensors
    return local


def logical_part(param: torch.nn.Parameter, name: str, pgs: ProcessGroupCollection) -> LogicalPart:
    """Return which part of its logical tensor a parameter is.

    Args:
        param: a DTensor, or a tensor with the attributes `tensor_model_parallel` and `partition_dim` where it is cut.
        name: its name, for errors.
        pgs: the process groups.

    Raises:
        RoutingError: the attributes do not fit the shape, or a DTensor has a placement that cannot be stepped.
    """
    group = pgs.tensor_parallel(is_expert=not getattr(param, "allreduce", True))
    if is_dtensor(param):
        return _by_placements(param, name, group)
    return _by_attributes(param, name, group)


def _by_attributes(param: torch.Tensor, name: str, group: ProcessGroup | None) -> LogicalPart:
    shape = tuple(param.shape)
    if not getattr(param, "tensor_model_parallel", False):
        return LogicalPart(shape, whole(shape))
    dim = int(getattr(param, "partition_dim", -1))
    if dim < 0 or size_of(group) == 1:
        return LogicalPart(shape, whole(shape), tensor_parallel=True, partition_dim=dim)
    if dim >= len(shape):
        raise RoutingError(
            f"parameter {name!r} of shape {shape} has partition_dim={dim}; it must be below {len(shape)}",
            names=[name],
        )
    stride = getattr(param, "partition_stride", 1)
    if stride != 1:
        raise RoutingError(
            f"parameter {name!r} has partition_stride={stride}; only 1 is supported", names=[name]
        )
    full = tuple(extent * size_of(group) if axis == dim else extent for axis, extent in enumerate(shape))
    offsets = tuple(rank_in(group) * extent if axis == dim else 0 for axis, extent in enumerate(shape))
    return LogicalPart(full, (offsets, shape), tensor_parallel=True, partition_dim=dim)


def _by_placements(param: Any, name: str, group: ProcessGroup | None) -> LogicalPart:
    shape, mesh = tuple(param.shape), param.device_mesh
    part = LogicalPart(shape, whole(shape))
    others: list[tuple[Placement, int]] = []
    for mesh_dim, placement in enumerate(param.placements):
        ranks = mesh.size(mesh_dim)
        if not _is_over(mesh, mesh_dim, group):
            others.append((placement, ranks))
        elif placement.is_shard():
            dim = placement.dim % len(shape)
            box = _chunk(shape, dim, ranks, mesh.get_local_rank(mesh_dim))
            part = LogicalPart(shape, box, tensor_parallel=True, partition_dim=dim)
        elif not placement.is_replicate():
            raise RoutingError(
                f"parameter {name!r} is a DTensor with the placement {placement!r} over the {ranks} tensor-parallel "
                "ranks; allowed are Shard and Replicate",
                names=[name],
            )
    return evolve(part, dp_placements=tuple(others))


def _is_over(mesh: Any, mesh_dim: int, group: ProcessGroup | None) -> bool:
    """Return whether a mesh dimension is a process group of several ranks, in the same order."""
    if group is None or group.size() == 1 or mesh.size(mesh_dim) != group.size():
        return False
    return dist.get_process_group_ranks(mesh.get_group(mesh_dim)) == dist.get_process_group_ranks(group)


def _chunk(shape: tuple[int, ...], dim: int, count: int, index: int) -> Box:
    """Return the box of one of `count` chunks along a dimension, as `torch.chunk` cuts: later ones may be shorter."""
    length = -(-shape[dim] // count)
    start, stop = min(index * length, shape[dim]), min((index + 1) * length, shape[dim])
    offsets = tuple(start if axis == dim else 0 for axis in range(len(shape)))
    return offsets, tuple(stop - start if axis == dim else extent for axis, extent in enumerate(shape))


def local_box(routing: Routing | None, name: str) -> Box | None:
    """Return the part of a parameter that a rank's model holds; None where nobody has said it.

    Args:
        routing: of the model; None for optimizers that were wrapped by hand.
        name: of the parameter.
    """
    entry = None if routing is None else routing.params.get(name)
    return None if entry is None else entry.spec.box


def shard_elements(local: torch.Tensor, shard: Shard, box: Box | None = None) -> torch.Tensor:
    """Return a shard's elements, flat; a view where the memory allows it.

    Args:
        local: what the model holds of the parameter; not a DTensor.
        shard: which elements: a range inside a box, which may be smaller than `local`.
        box: the part of the logical tensor that `local` is; None: the whole of it or the shard's own box, which the
            shape tells.

    Raises:
        ShardingError: `local` does not hold them, or its shape does not tell which part it is.

    Example:
        >>> import torch
        >>> from megaopt_core.params.specs import Shard
        >>> shard = Shard("w", shape=(4, 2), box=((2, 0), (2, 2)), start=1, stop=4)
        >>> shard_elements(torch.arange(8).view(4, 2), shard)
        tensor([5, 6, 7])
    """
    held = tuple(local.shape)
    if box is None or box[1] != held:
        box = whole(shard.shape) if held == shard.shape else shard.box
    offsets, sizes = shard.box
    starts = [offset - first for offset, first in zip(offsets, box[0], strict=True)]
    inside = box[1] == held and all(
        start >= 0 and start + size <= extent for start, size, extent in zip(starts, sizes, held, strict=True)
    )
    if not inside:
        raise ShardingError(
            f"the box {shard.box} of {shard.name!r} is not in the model's tensor of shape {held}, of the whole shape "
            f"{shard.shape}"
        )
    for dim, (start, size) in enumerate(zip(starts, sizes, strict=True)):
        local = local.narrow(dim, start, size)
    return local.reshape(-1)[shard.start : shard.stop]
