"""The strategy `fsdp`: every rank steps what FSDP2 has left it, owners transform what must be seen whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from attrs import frozen

from megaopt_core import Granularity, ParamSpec, ProcessGroupCollection, ShardingStrategy
from megaopt_core.errors import ShardingError
from megaopt_core.params import AxisPlacement, is_dtensor, local_tensor
from megaopt_core.sharding import LayoutOptions, LiveModel, ParamLayout, World
from megaopt_fsdp.exchange import OwnerExchange
from megaopt_fsdp.layout import FsdpLayout
from megaopt_fsdp.mail import Mail
from megaopt_fsdp.owned_params import OwnedParams
from megaopt_fsdp.params import LocalParams, local_piece
from megaopt_fsdp.routes import routes_of, told_of
from megaopt_fsdp.stage import Stage

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["Fsdp"]

_DATA = ("dp", "dp_replicate", "expert_dp", "expert_dp_replicate")


@frozen
class Fsdp(ShardingStrategy):
    """Every rank steps the part of each DTensor that it holds, with state for that part alone.

    Optimizers that work element by element send nothing. Of an optimizer that must see whole tensors only what it
    transforms travels: to one owner among the ranks that hold the tensor, balanced by cost, and back. Where its step
    cannot be split gradients travel to the owner, which alone has state and main values, and new values travel back.

    Args:
        name: the registered name.
    """

    name: str = "fsdp"
    granularities: frozenset[Granularity] = frozenset(Granularity)

    def claims(self, param: torch.nn.Parameter, placements: Sequence[AxisPlacement]) -> bool:
        """Return whether data parallelism has cut a DTensor, as `fully_shard` does.

        Args:
            param: the parameter.
            placements: how the axes of the world divide it.
        """
        cut = [placement.axis for placement in placements if placement.divides and placement.dim is not None]
        return is_dtensor(param) and any(axis in _DATA or axis.startswith("mesh.") for axis in cut)

    def layout(self, specs: Sequence[ParamSpec], world: World, options: LayoutOptions) -> ParamLayout:
        """Return who holds what, and who transforms what.

        Args:
            specs: the parameters, in model order.
            world: number of ranks along each axis.
            options: the buffers that the model is wrapped in.

        Raises:
            ShardingError: gradients are in buffers, an axis is not known, or no parameter is cut.
        """
        if options.buffers is not None:
            raise ShardingError(
                f"sharding={self.name!r} steps models that fully_shard has cut, but this model is wrapped in "
                "DistributedDataParallel: use one of the two"
            )
        layout = FsdpLayout(tuple(specs), world)
        layout.require_known_axes()
        layout.warn_of_groups()
        return layout

    def attach(
        self,
        layout: ParamLayout,
        model: LiveModel,
        pgs: ProcessGroupCollection,
        groups: Sequence[int],
        *,
        is_expert: bool = False,
    ) -> LocalParams | OwnedParams:
        """Return what this rank steps of the parameters in `groups`: a collective where something travels.

        Args:
            layout: what `layout` returned.
            model: the live model.
            pgs: the process groups.
            groups: indices of the routing's groups.
            is_expert: they hold expert parameters.

        Raises:
            ShardingError: parameters lie where the process group sends nothing.
            RankMismatchError: ranks have planned other owners.
        """
        if not isinstance(layout, FsdpLayout):
            raise ShardingError(f"{self.name!r} cannot attach a {type(layout).__name__}")
        wanted = frozenset(groups)
        specs = [spec for spec in layout.pieces(model.rank) if spec.group in wanted]
        stats = self._stats_group(layout, model, pgs, is_expert=is_expert)
        grid = layout.grid(is_expert=is_expert)
        buckets = layout.buckets(wanted, is_expert=is_expert)
        if not buckets or grid.size == 1:
            return LocalParams(model, [local_piece(spec, model) for spec in specs], stats)
        digest = layout.digest(is_expert=is_expert)
        stage = model.shared(grid, lambda: _agreed(Stage.of(grid, model.rank, pgs), digest))
        device, mail = _device_of(model, stage), Mail(stage.group)
        travelling = routes_of(buckets, stage, model.rank)
        if layout.steps_whole(wanted):
            told = told_of("whole", travelling, stage)
            return OwnedParams(model, specs, stats, travelling, mail, told, device)
        pieces = [local_piece(spec, model) for spec in specs]
        exchange = OwnerExchange(pieces, model.infos, travelling, device, mail)
        return LocalParams(model, pieces, stats, exchange, told_of("split", travelling, stage))

    @staticmethod
    def _stats_group(
        layout: FsdpLayout, model: LiveModel, pgs: ProcessGroupCollection, *, is_expert: bool
    ) -> ProcessGroup | None:
        """Return the group over which norms add up: with copies of the model (HSDP), in which owners may stand too."""
        copies = [axis for axis in layout.spread_axes(is_expert=is_expert) if axis.endswith("_replicate")]
        if not copies:
            return pgs.sharded_stats_group(is_expert=is_expert)
        grid = layout.model_grid(is_expert=is_expert)
        return model.shared(grid, lambda: Stage.of(grid, model.rank, pgs)).group


def _agreed(stage: Stage, digest: str) -> Stage:
    """Return a stage, once its ranks have found that they plan alike."""
    stage.require_same_plan(digest)
    return stage


def _device_of(model: LiveModel, stage: Stage) -> torch.device:
    """Return where parameters lie, if something can be sent from there."""
    device = next((local_tensor(param).device for param in model.params.values()), torch.device("cpu"))
    if not stage.sends_from(device):
        raise ShardingError(
            f"parameters lie on {device.type!r}, as CPUOffloadPolicy leaves them, but the process group of the ranks "
            f"that share them sends nothing from there; make it with init_process_group('{device.type}:gloo,cuda:nccl')"
        )
    return device
