"""What attributes and DTensors say of a model over ranks: which part of a tensor a rank has, and who the ranks are."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from attrs import Factory, evolve, field, frozen

from megaopt_core.errors import RoutingError
from megaopt_core.parallel._groups import AXES, MESH_DIMS, ProcessGroupCollection, rank_in, size_of
from megaopt_core.parallel._reduction import new_group
from megaopt_core.params._shards import AxisPlacement, Box, RankCoordinates, part_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.placement_types import Placement

__all__ = ["LogicalPart", "groups_of_model", "is_dtensor", "is_marked_expert", "local_tensor", "logical_part"]


@frozen
class LogicalPart:
    """A rank's part of a logical tensor.

    Args:
        shape: of the logical tensor over all ranks that hold parts of it.
        placements: how each axis divides the logical tensor, in the order of cutting.
        coordinates: where this rank stands on these axes.
        tensor_parallel: it is cut over the tensor-parallel group, not the same on all its ranks.
        partition_dim: dimension that tensor parallelism cuts; -1 for none.
        is_expert: its attribute `allreduce` is False, or it is a DTensor that lies on the ranks of experts.
        box: this rank's part of `shape`.
    """

    shape: tuple[int, ...]
    placements: tuple[AxisPlacement, ...] = ()
    coordinates: RankCoordinates = Factory(dict)
    tensor_parallel: bool = False
    partition_dim: int = -1
    is_expert: bool = False
    box: Box = field(init=False)

    @box.default
    def _box(self) -> Box:
        return part_of(self.shape, self.placements, self.coordinates)


def is_dtensor(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is a DTensor.

    Args:
        tensor: any tensor.
    """
    return hasattr(tensor, "placements") and hasattr(tensor, "device_mesh")


def is_marked_expert(param: torch.Tensor) -> bool:
    """Return whether a parameter's attribute `allreduce` is False: it is an expert's, whose replicas are others.

    Args:
        param: the parameter; one without the attribute is dense.

    Example:
        >>> is_marked_expert(torch.nn.Parameter(torch.zeros(2)))
        False
    """
    return not getattr(param, "allreduce", True)


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
    is_expert = is_marked_expert(param)
    if is_dtensor(param):
        # Attributes vanish when parameters become DTensors; where these lie stays.
        if not is_expert and size_of(pgs.ep) > 1:
            is_expert = _lies_with_experts(param, pgs)
        return _by_placements(param, name, pgs, is_expert)
    return _by_attributes(param, name, pgs, is_expert)


def _tensor_axis(is_expert: bool) -> str:
    return "expert_tp" if is_expert else "tp"


def _by_attributes(
    param: torch.Tensor, name: str, pgs: ProcessGroupCollection, is_expert: bool
) -> LogicalPart:
    shape, axis = tuple(param.shape), _tensor_axis(is_expert)
    group = pgs.of_axis(axis)
    is_cut = bool(getattr(param, "tensor_model_parallel", False))
    dim = getattr(param, "partition_dim", -1) if is_cut else -1
    if type(dim) is not int or dim < -1:
        raise RoutingError(
            f"parameter {name!r} has partition_dim={dim!r}; it must be a dimension, or -1", names=[name]
        )
    here = LogicalPart(shape, tensor_parallel=is_cut, partition_dim=dim, is_expert=is_expert)
    if dim < 0 or size_of(group) == 1:
        return here
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
    full = tuple(extent * size_of(group) if each == dim else extent for each, extent in enumerate(shape))
    placement = AxisPlacement(axis, size_of(group), dim=dim)
    return evolve(here, shape=full, placements=(placement,), coordinates={axis: rank_in(group)})


def _by_placements(param: Any, name: str, pgs: ProcessGroupCollection, is_expert: bool) -> LogicalPart:
    shape, mesh = tuple(param.shape), param.device_mesh
    placements: list[tuple[int, AxisPlacement]] = []
    coordinates = {}
    for mesh_dim, placement in enumerate(param.placements):
        ranks = mesh.size(mesh_dim)
        axis = _axis_of(mesh, mesh_dim, pgs, is_expert)
        coordinates[axis] = mesh.get_local_rank(mesh_dim)
        if _is_cut(placement):
            cut = AxisPlacement(axis, ranks, dim=placement.dim % len(shape))
            placements.append((_order(placement, mesh_dim), cut))
        elif not placement.is_replicate():
            raise RoutingError(
                f"parameter {name!r} is a DTensor with the placement {placement!r} over the {ranks} ranks of {axis!r}; "
                "allowed are Shard and Replicate",
                names=[name],
            )
    dims = {cut.axis: cut.dim for _, cut in placements}
    partition_dim = dims.get(_tensor_axis(is_expert))
    return LogicalPart(
        shape,
        tuple(cut for _, cut in sorted(placements, key=itemgetter(0))),
        coordinates,
        tensor_parallel=partition_dim is not None,
        partition_dim=-1 if partition_dim is None else partition_dim,
        is_expert=is_expert,
    )


def _is_cut(placement: Placement) -> bool:
    """Return whether a placement cuts; `is_shard()` is False for the strided shards that fully_shard makes."""
    return placement.is_shard() or hasattr(placement, "split_factor")


def _order(placement: Placement, mesh_dim: int) -> int:
    """Return when a mesh dimension cuts: a strided shard, which `fully_shard` makes of what is cut already, last."""
    strided = getattr(placement, "split_factor", 1) > 1
    return mesh_dim + (1 << 16 if strided else 0)


def _lies_with_experts(param: Any, pgs: ProcessGroupCollection) -> bool:
    """Return whether a DTensor's mesh names expert parallelism, or has ranks that share experts and nothing else."""
    mesh = param.device_mesh
    if _meaning(mesh).count("ep"):
        return True
    experts, dense = (
        [dist.get_process_group_ranks(group) for group in map(pgs.of_axis, axes) if group is not None]
        for axes in (("ep", "expert_dp"), ("dp", "dp_replicate", "tp"))
    )
    cuts = [
        dist.get_process_group_ranks(mesh.get_group(dim)) for dim in range(mesh.ndim) if mesh.size(dim) > 1
    ]
    return any(ranks in experts and ranks not in dense for ranks in cuts)


def _meaning(mesh: DeviceMesh) -> tuple[str | None, ...]:
    """Return what the dimensions of a mesh are; None for names that are not known."""
    return tuple(map(MESH_DIMS.get, mesh.mesh_dim_names or ()))


def _axis_of(mesh: Any, mesh_dim: int, pgs: ProcessGroupCollection, is_expert: bool) -> str:
    """Return the axis of the world that a mesh dimension is: one with the same ranks, else its own name."""
    mine = dist.get_process_group_ranks(mesh.get_group(mesh_dim))
    # Where all data parallelism is expert parallelism, "dp" has the ranks of "ep".
    data_axes = ["expert_dp", "ep"] if is_expert else ["dp"]
    names = [_tensor_axis(is_expert), *data_axes, *AXES]
    for name in names:
        group = pgs.of_axis(name)
        if group is not None and len(mine) > 1 and dist.get_process_group_ranks(group) == mine:
            return name
    named = mesh.mesh_dim_names
    return f"mesh.{named[mesh_dim] if named else mesh_dim}"


def groups_of_model(chunks: Iterable[torch.nn.Module]) -> ProcessGroupCollection:
    """Return the process groups of a model for which nobody gave any.

    Of DTensors the largest mesh tells whose dimensions have names that :meth:`ProcessGroupCollection.from_device_mesh`
    knows; without one they are those of the default group. A mesh of the same ranks that alone has (or lacks) a
    dimension of expert parallelism adds the groups of experts (or of everything else).

    Args:
        chunks: the model chunks.
    """
    meshes = [mesh for mesh in _meshes_of(chunks) if mesh.mesh_dim_names and None not in _meaning(mesh)]
    if not meshes:
        return ProcessGroupCollection.from_default()
    largest = max(meshes, key=_extent)
    found = ProcessGroupCollection.from_device_mesh(largest)
    # Trainers that cut experts otherwise than the rest have two meshes over the same ranks.
    has_experts = "ep" in _meaning(largest)
    others = [
        mesh
        for mesh in meshes
        if mesh.size() == largest.size() and ("ep" in _meaning(mesh)) is not has_experts
    ]
    if not others:
        return found
    other = ProcessGroupCollection.from_device_mesh(max(others, key=_extent))
    return _joined(other, found) if has_experts else _joined(found, other)


def _extent(mesh: DeviceMesh) -> tuple[int, int]:
    """Return what meshes are compared by: of equal ones that with more dimensions says more."""
    return mesh.size(), mesh.ndim


def _joined(dense: ProcessGroupCollection, experts: ProcessGroupCollection) -> ProcessGroupCollection:
    """Return the groups of a model whose experts have a mesh of their own."""
    expt_tp = experts.expt_tp
    if expt_tp is None and dense.tp is not None:
        # None would stand for the group that cuts dense parameters.
        expt_tp = new_group([dist.get_rank()], dense.tp, "making the group of a rank's whole experts")
    return evolve(
        dense,
        ep=experts.ep,
        expt_tp=expt_tp,
        expt_dp=experts.expt_dp,
        tp_ep_pp=experts.tp_ep_pp,
        intra_expt_dp=experts.intra_expt_dp,
        inter_expt_dist_opt=experts.inter_expt_dist_opt,
    )


def _meshes_of(chunks: Iterable[torch.nn.Module]) -> Iterator[DeviceMesh]:
    seen: set[int] = set()
    for chunk in chunks:
        for param in chunk.parameters():
            if is_dtensor(param):
                mesh: Any = param.device_mesh  # type: ignore[attr-defined] # of DTensors
                if id(mesh) not in seen:
                    seen.add(id(mesh))
                    yield mesh
                    root = getattr(mesh, "_get_root_mesh", None)
                    if root is not None:
                        yield root()
