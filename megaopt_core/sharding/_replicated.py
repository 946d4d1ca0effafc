"""The built-in strategy: every rank steps every parameter, all that tensor parallelism left it of it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from attrs import define, frozen

from megaopt_core.errors import ShardingError
from megaopt_core.parallel._groups import ProcessGroupCollection
from megaopt_core.params._parts import is_dtensor, local_tensor
from megaopt_core.params._shards import RankCoordinates
from megaopt_core.params._specs import Granularity, ParamSpec
from megaopt_core.sharding._layout import LayoutOptions, PieceSpec, World
from megaopt_core.sharding._live_model import LiveModel, Piece, gradient_of, local_gradient
from megaopt_core.sharding._protocol import ParamLayout, ShardedParams, ShardingStrategy
from megaopt_core.sharding._wrapped import finish_grad_sync, wrappers_of

__all__ = ["Replicated", "ReplicatedLayout", "ReplicatedParams"]


@frozen
class ReplicatedLayout:
    """One piece per parameter: all that a rank holds of it."""

    specs: tuple[ParamSpec, ...]

    def pieces(self, rank: RankCoordinates) -> tuple[PieceSpec, ...]:
        """Return one piece for each parameter that a rank has.

        Args:
            rank: its coordinates.
        """
        mine = (spec for spec in self.specs if spec.held_by(rank))
        return tuple(PieceSpec.of(spec.shard(rank), spec.group) for spec in mine)


@define
class ReplicatedParams(ShardedParams):
    """Live pieces that are the model's parameters themselves; of DTensors, the local tensors.

    Args:
        pieces: one a parameter.
        stats_group: norms and counts add up over it.
        chunks: the model; gradients of wrapped chunks are reduced before they are taken. None: who reduces the
            parameters' gradients is asked of the parameters.
    """

    pieces: Sequence[Piece]
    stats_group: dist.ProcessGroup | None = None
    chunks: Sequence[torch.nn.Module] = ()

    def collect_grads(self) -> None:
        """Take every parameter's gradient as it is; that of a DTensor where its parameter is."""
        bare = () if self.chunks else [param for piece in self.pieces for param in piece.model_params]
        finish_grad_sync(self.chunks, bare)
        for piece in self.pieces:
            (param,) = piece.model_params
            piece.grad = gradient_of(param) if param is piece.param else local_gradient(param)

    def take_model_values(self) -> None:
        """Nothing to bring: the pieces are the model's memory."""

    def refuses_late(self, param: torch.nn.Parameter) -> str | None:
        """Return why a parameter's gradient would be another on every rank, None when it would not.

        Args:
            param: the parameter.
        """
        if is_dtensor(param):
            return "it is a DTensor"
        torchs = [
            chunk
            for chunk in self.chunks
            if isinstance(chunk, torch.nn.parallel.DistributedDataParallel)
            and dist.get_world_size() > 1
            and all(param is not each for each in _reduced_by(chunk))
        ]
        for wrapper in (*wrappers_of(self.chunks), *torchs):
            return f"{type(wrapper).__name__} reduces only gradients of the parameters that trained when it was made"
        return None

    def take_in(self, piece: Piece) -> None:
        """Add a piece that is a parameter.

        Args:
            piece: the piece.
        """
        self.pieces = [*self.pieces, piece]

    def start_param_sync(self) -> None:
        """Nothing to bring: every rank has stepped everything."""

    def finish_param_sync(self) -> None:
        """Nothing to wait for."""


def _uneven_cut(param: torch.nn.Parameter) -> str | None:
    """Return which dimension of a DTensor is not divided into equal parts, None when all are."""
    if not is_dtensor(param):
        return None
    mesh, placements = param.device_mesh, param.placements  # type: ignore[attr-defined] # of DTensors
    for mesh_dim, placement in enumerate(placements):
        ranks = mesh.size(mesh_dim)
        if placement.is_shard() and param.shape[placement.dim] % ranks:
            return f"dimension {placement.dim} of its shape {tuple(param.shape)} is unevenly cut over {ranks} ranks"
    return None


@frozen
class Replicated(ShardingStrategy):
    """Every data-parallel rank steps every parameter; gradients are expected to be reduced already."""

    name: str = "replicated"
    granularities: frozenset[Granularity] = frozenset(Granularity)

    def refuse(self, param: torch.nn.Parameter, spec: ParamSpec) -> str | None:
        """Return why a DTensor cannot be stepped where it is, None when it can; every other parameter can.

        Args:
            param: the live parameter.
            spec: the same as pure data.
        """
        if spec.divided_over_data:
            placement = spec.divided_over_data[0]
            return (
                f"it is a DTensor that is cut along dimension {placement.dim} over the {placement.size} ranks of "
                f"{placement.axis!r}, which are not tensor-parallel. Pass them as pg_collection, a DeviceMesh with a "
                "dimension 'tp'. A model that fully_shard has cut needs another sharding strategy"
            )
        if spec.granularity is Granularity.TENSOR and (cut := _uneven_cut(param)):
            return f"{spec.optimizer!r} steps whole matrices, but {cut}"
        return None

    def layout(self, specs: Sequence[ParamSpec], world: World, options: LayoutOptions) -> ParamLayout:
        """Return one whole piece per parameter.

        Args:
            specs: the parameters, in model order.
            world: not looked at.
            options: the buffers that the model is wrapped in.

        Raises:
            ShardingError: gradients are scattered, so that no rank has whole ones.
        """
        if options.buffers is not None:
            raise ShardingError(
                f"sharding={self.name!r} needs whole gradients, but DistributedDataParallel gives each rank a part: "
                "wrap the model with use_distributed_optimizer=False, or build with sharding='distributed'"
            )
        return ReplicatedLayout(tuple(specs))

    def attach(
        self,
        layout: ParamLayout,
        model: LiveModel,
        pgs: ProcessGroupCollection,
        groups: Sequence[int],
        *,
        is_expert: bool = False,
    ) -> ReplicatedParams:
        """Return the parameters of `groups` as pieces.

        Args:
            layout: what `layout` returned.
            model: the live model.
            pgs: the process groups; norms are added up over those that hold parts of one model.
            groups: indices of the routing's groups.
            is_expert: the groups hold expert parameters.
        """
        wanted = set(groups)
        pieces = []
        for spec in layout.pieces(model.rank):
            if spec.group in wanted:
                param = model.params[spec.members[0][1].name]
                # What is stepped of a DTensor shares the memory of its local tensor.
                stepped = torch.nn.Parameter(local_tensor(param)) if is_dtensor(param) else param
                pieces.append(Piece(spec, stepped, (param,)))
        return ReplicatedParams(pieces, pgs.stats_group(is_expert=is_expert), model.chunks)


def _reduced_by(wrapper: torch.nn.parallel.DistributedDataParallel) -> list[torch.Tensor]:
    """Return the parameters whose gradients torch's wrapper reduces: those that trained when it was made."""
    return [
        param for bucket in wrapper.reducer._get_zeros_like_grad_buckets() for param in bucket.parameters()
    ]
