"""The process groups that an optimizer needs, gathered in one record."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeGuard, cast

import torch.distributed as dist
from attrs import define

from megaopt_core.errors import ParallelGroupError
from megaopt_core.parallel._timeouts import limit_waiting

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

__all__ = [
    "AXES",
    "MESH_DIMS",
    "ProcessGroupCollection",
    "communicates",
    "is_distributed",
    "rank_in",
    "size_of",
]

AXES = ("pp", "dp", "dp_replicate", "tp", "ep", "expert_dp", "expert_dp_replicate", "expert_tp")
"""The axes that ranks stand on: data-parallel ones share an optimizer out, `*_replicate` count whole copies of it."""

MESH_DIMS: Mapping[str, str] = {
    **{name: name for name in ("tp", "pp", "cp", "dp", "ep")},
    **dict.fromkeys(("dp_shard", "fsdp", "shard", "efsdp", "dp_shard_mod_ep", "data_parallel"), "dp"),
    **dict.fromkeys(("dp_replicate", "replicate", "ddp"), "dp_replicate"),
    "dp_shard_in_ep": "ep",
    "tensor_parallel": "tp",
}
"""Name of a mesh dimension to what it is; the short names first, then those of FSDP2 and of trainers built on it."""

_SHORT = ("tp", "pp", "cp", "dp", "ep")


def is_distributed() -> bool:
    """Return whether torch.distributed is initialised in this process."""
    return dist.is_available() and dist.is_initialized()


def size_of(group: ProcessGroup | None) -> int:
    """Return the number of ranks in a group; 1 for None.

    Args:
        group: a process group, or None for this process alone.
    """
    return 1 if group is None else group.size()


def rank_in(group: ProcessGroup | None) -> int:
    """Return this process's rank in a group; 0 for None.

    Args:
        group: a process group, or None for this process alone.
    """
    return 0 if group is None else group.rank()


def communicates(group: ProcessGroup | None) -> TypeGuard[ProcessGroup]:
    """Return whether ranks of a group tell each other anything: not one alone, nor torch's fake process group.

    Args:
        group: a process group, or None for this process alone.
    """
    return size_of(group) > 1 and dist.get_backend(group) != "fake"


def _larger_than_one(*groups: ProcessGroup | None) -> list[ProcessGroup]:
    return [group for group in groups if group is not None and group.size() > 1]


@define
class ProcessGroupCollection:
    """Process groups by purpose; None everywhere means this process alone.

    Args:
        tp: tensor parallel.
        pp: pipeline parallel.
        cp: context parallel.
        dp: data parallel.
        dp_cp: data and context parallel together: gradients of dense parameters are reduced over it.
        mp: model parallel: every rank that holds a part of one model replica (tensor and pipeline); norms are added up
            over it. Taken from `tp` or `pp` where only one of them has several ranks.
        ep: expert parallel.
        expt_tp: tensor parallel inside experts.
        expt_dp: data parallel of experts: their gradients are reduced over it.
        tp_ep_pp: every rank that holds a part of the experts of one replica; taken from the only group that divides
            them where there is one.
        intra_dist_opt: every rank that holds a part of one sharded optimizer: norms and counts are reduced over it;
            None: the group that parameters are sharded over, where nothing else divides the model.
        intra_dp_cp: the part of `dp_cp` that shares one instance of the distributed optimizer out; None: all of it.
        intra_expt_dp: the same of `expt_dp`.
        inter_dist_opt: the ranks with the same shard in other instances of the distributed optimizer.
        inter_expt_dist_opt: the same for expert parameters.

    Raises:
        ParallelGroupError: `tp` and `pp` both have several ranks, and no `mp` joins them.

    Example:
        >>> ProcessGroupCollection().data_parallel_size
        1
    """

    tp: ProcessGroup | None = None
    pp: ProcessGroup | None = None
    cp: ProcessGroup | None = None
    dp: ProcessGroup | None = None
    dp_cp: ProcessGroup | None = None
    mp: ProcessGroup | None = None
    ep: ProcessGroup | None = None
    expt_tp: ProcessGroup | None = None
    expt_dp: ProcessGroup | None = None
    tp_ep_pp: ProcessGroup | None = None
    intra_dist_opt: ProcessGroup | None = None
    intra_dp_cp: ProcessGroup | None = None
    intra_expt_dp: ProcessGroup | None = None
    inter_dist_opt: ProcessGroup | None = None
    inter_expt_dist_opt: ProcessGroup | None = None

    def __attrs_post_init__(self) -> None:
        if self.mp is None:
            dividing = _larger_than_one(self.tp, self.pp)
            if len(dividing) > 1:
                raise ParallelGroupError(
                    f"process groups tp ({size_of(self.tp)} ranks) and pp ({size_of(self.pp)} ranks) divide the model, "
                    "but mp is not given: the group of all ranks that hold a part of one replica, over which norms "
                    "are added up. A DeviceMesh provides it"
                )
            self.mp = dividing[0] if dividing else None
        if self.tp_ep_pp is None:
            dividing = _larger_than_one(*self._dividing_experts)
            if self.expt_tp is None and size_of(self.ep) == 1:
                self.tp_ep_pp = self.mp
            elif len(dividing) < 2:
                self.tp_ep_pp = dividing[0] if dividing else self.expt_tp

    @property
    def _dividing_experts(self) -> tuple[ProcessGroup | None, ...]:
        return self.tensor_parallel(is_expert=True), self.ep, self.pp

    @classmethod
    def from_default(cls) -> ProcessGroupCollection:
        """Return data parallelism over the default group, or single-process where there is none."""
        if not is_distributed():
            return cls()
        world = dist.group.WORLD
        return cls(dp=world, dp_cp=world, expt_dp=world)

    @classmethod
    def from_device_mesh(cls, mesh: DeviceMesh) -> ProcessGroupCollection:
        """Return the groups of a mesh whose dimensions are named `tp`, `pp`, `cp`, `dp`, `ep` (any subset).

        The combined groups (`dp_cp`, `mp`, `tp_ep_pp`) are flattened from the dimensions that exist. With a dimension
        `dp_replicate` beside `dp` (HSDP) the ranks along `dp` share one instance of a sharded optimizer out, and those
        along `dp_replicate` have whole copies of it. Other names that FSDP2 and its trainers use are read too:
        `dp_shard`, `fsdp`, `shard`, `efsdp`, `dp_shard_mod_ep` and `data_parallel` for `dp`, `dp_shard_in_ep` for `ep`,
        `replicate` and `ddp` for `dp_replicate`, `tensor_parallel` for `tp`.

        Args:
            mesh: the device mesh, or a part of one; `ep` divides data parallelism: expert parameters are reduced over
                `dp` only, dense ones over `dp`, `ep` and `cp`.

        Raises:
            ParallelGroupError: the mesh has no dimension names, or one that is not known.
        """
        names = mesh.mesh_dim_names
        if not names:
            raise ParallelGroupError(
                "the DeviceMesh has no dimension names; name them with mesh_dim_names=('dp', 'tp')"
            )
        unknown = [name for name in names if name not in MESH_DIMS]
        if unknown:
            raise ParallelGroupError(
                f"DeviceMesh dimensions {unknown} are not known; allowed are {list(_SHORT)}, and {list(MESH_DIMS)[5:]}"
            )

        def of(*dims: str) -> ProcessGroup | None:
            present = tuple(name for name in names if MESH_DIMS[name] in dims)
            if not present:
                return None
            if len(present) == 1:
                return mesh.get_group(present[0])
            part: Any = mesh[present]
            group: ProcessGroup = part._flatten("_".join(present)).get_group()
            limit_waiting(group)
            return group

        copies = of("dp_replicate")
        return cls(
            tp=of("tp"),
            pp=of("pp"),
            cp=of("cp"),
            dp=of("dp_replicate", "dp", "ep"),
            dp_cp=of("dp_replicate", "dp", "ep", "cp"),
            mp=of("tp", "pp"),
            ep=of("ep"),
            expt_tp=of("tp"),
            expt_dp=of("dp_replicate", "dp", "cp"),
            tp_ep_pp=of("tp", "ep", "pp"),
            intra_dist_opt=of(*_SHORT),
            intra_dp_cp=None if copies is None else of("dp", "ep", "cp"),
            intra_expt_dp=None if copies is None else of("dp", "cp"),
            inter_dist_opt=copies,
            inter_expt_dist_opt=copies,
        )

    @classmethod
    def of(
        cls, groups: ProcessGroupCollection | DeviceMesh | Mapping[str, Any] | object | None
    ) -> ProcessGroupCollection:
        """Return a collection from whatever a caller passes as `pg_collection`.

        Args:
            groups: a collection, a DeviceMesh, a mapping or any object with attributes of these names; None means the
                default group.

        Raises:
            ParallelGroupError: a mapping has a key that is no group's name, or the object has none of the names.
        """
        if groups is None:
            return cls.from_default()
        if isinstance(groups, cls):
            return groups
        if hasattr(groups, "mesh_dim_names"):
            return cls.from_device_mesh(cast("DeviceMesh", groups))
        fields = tuple(cls.__annotations__)
        if isinstance(groups, Mapping):
            unknown = [key for key in groups if key not in fields]
            if unknown:
                raise ParallelGroupError(f"unknown process groups {unknown}; allowed are {list(fields)}")
            return cls(**groups)
        found = {name: getattr(groups, name) for name in fields if getattr(groups, name, None) is not None}
        is_class = isinstance(groups, type)
        if is_class or not (found or any(hasattr(groups, name) for name in fields)):
            raise ParallelGroupError(
                f"pg_collection={groups!r} is no ProcessGroupCollection, DeviceMesh or mapping of {list(fields)}"
            )
        return cls(**found)

    def stats_group(self, *, is_expert: bool = False) -> ProcessGroup | None:
        """Return the group over which norms of unsharded parameters add up to those of one whole model.

        Args:
            is_expert: of expert parameters, which expert parallelism cuts too.

        Raises:
            ParallelGroupError: several groups divide the experts, and no group joins them.
        """
        if not is_expert:
            return self.mp
        if self.tp_ep_pp is None and _larger_than_one(*self._dividing_experts):
            sizes = [size_of(group) for group in self._dividing_experts]
            raise ParallelGroupError(
                f"experts are divided over expt_tp or tp, ep and pp of {sizes} ranks, but tp_ep_pp is not given: the "
                "group of all ranks that hold a part of one replica's experts. A DeviceMesh provides it"
            )
        return self.tp_ep_pp

    def tensor_parallel(self, *, is_expert: bool = False) -> ProcessGroup | None:
        """Return the group over which parameters that are not cut are duplicates of each other.

        Args:
            is_expert: of expert parameters.
        """
        return self.expt_tp if is_expert and self.expt_tp is not None else self.tp

    def shard_group(self, *, is_expert: bool = False) -> ProcessGroup | None:
        """Return the group that shares a sharded optimizer out: data parallelism, or one instance's part of it.

        Args:
            is_expert: of expert parameters.
        """
        if is_expert:
            return self.intra_expt_dp if self.intra_expt_dp is not None else self.expt_dp
        return self.intra_dp_cp if self.intra_dp_cp is not None else self.dense_dp

    @property
    def replicas(self) -> list[tuple[ProcessGroup, bool]]:
        """The groups of several ranks that hold replicas, and whether of experts: of dense parameters first."""
        kinds = ((self.dense_dp, False), (self.expt_dp, True))
        return [(group, is_expert) for group, is_expert in kinds if communicates(group)]

    def of_axis(self, axis: str) -> ProcessGroup | None:
        """Return the group of the ranks along an axis of the world; None where there is one rank only.

        Args:
            axis: one of :data:`AXES`; any other axis has one rank.
        """
        groups = {
            "pp": self.pp,
            "dp": self.shard_group(),
            "dp_replicate": self.inter_dist_opt,
            "tp": self.tp,
            "ep": self.ep,
            "expert_dp": self.shard_group(is_expert=True),
            "expert_dp_replicate": self.inter_expt_dist_opt,
            "expert_tp": self.tensor_parallel(is_expert=True),
        }
        return groups.get(axis)

    @property
    def axes(self) -> dict[str, int]:
        """Number of ranks along each of :data:`AXES`."""
        return {axis: size_of(self.of_axis(axis)) for axis in AXES}

    @property
    def coordinates(self) -> dict[str, int]:
        """Where this rank stands on each of :data:`AXES`."""
        return {axis: rank_in(self.of_axis(axis)) for axis in AXES}

    def sharded_stats_group(self, *, is_expert: bool = False) -> ProcessGroup | None:
        """Return the group over which norms of a sharded optimizer's pieces add up to those of the whole model.

        Args:
            is_expert: of expert parameters.

        Raises:
            ParallelGroupError: pieces are spread over two groups at once, and no group joins them.
        """
        if self.intra_dist_opt is not None:
            return self.intra_dist_opt
        shards, model = self.shard_group(is_expert=is_expert), self.stats_group(is_expert=is_expert)
        if size_of(shards) > 1 and size_of(model) > 1:
            raise ParallelGroupError(
                f"an optimizer that is sharded over {size_of(shards)} data-parallel ranks, of a model that is divided "
                f"over {size_of(model)}, needs intra_dist_opt: the group of all {size_of(shards) * size_of(model)} "
                "ranks that hold a part of it. A DeviceMesh provides it"
            )
        return model if size_of(model) > 1 else shards

    @property
    def dense_dp(self) -> ProcessGroup | None:
        """The group over which gradients of dense parameters are reduced."""
        return self.dp_cp if self.dp_cp is not None else self.dp

    @property
    def data_parallel_size(self) -> int:
        """Number of replicas of dense parameters."""
        return size_of(self.dense_dp)
