"""The strategy `fsdp`: every rank steps what FSDP2 has left it, owners transform what must be seen whole."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from attrs import frozen

from megaopt_core import Granularity, ParamSpec, ProcessGroupCollection, ShardingStrategy
from megaopt_core.errors import ShardingError
from megaopt_core.params import AxisPlacement, is_dtensor
from megaopt_core.sharding import LayoutOptions, LiveModel, ParamLayout, World
from megaopt_fsdp.exchange import OwnerExchange
from megaopt_fsdp.layout import FsdpLayout, travels
from megaopt_fsdp.mail import Mail
from megaopt_fsdp.params import LocalParams, local_piece
from megaopt_fsdp.routes import routes_of
from megaopt_fsdp.stage import Stage

__all__ = ["Fsdp"]

_DATA = ("dp", "dp_replicate", "expert_dp", "expert_dp_replicate")


@frozen
class Fsdp(ShardingStrategy):
    """Every rank steps the part of each DTensor that it holds, with state for that part alone.

    Optimizers that work element by element send nothing. Of an optimizer that must see whole tensors only what it
    transforms travels: to one owner among the ranks that hold the tensor, balanced by cost, and back.

    Args:
        name: the registered name.
    """

    name: str = "fsdp"
    granularities: frozenset[Granularity] = frozenset({Granularity.ELEMENT, Granularity.TENSOR})

    def claims(self, param: torch.nn.Parameter, placements: Sequence[AxisPlacement]) -> bool:
        """Return whether data parallelism has cut a DTensor, as `fully_shard` does.

        Args:
            param: the parameter.
            placements: how the axes of the world divide it.
        """
        cut = [placement.axis for placement in placements if placement.divides and placement.dim is not None]
        return is_dtensor(param) and any(axis in _DATA or axis.startswith("mesh.") for axis in cut)

    def refuse(self, param: torch.nn.Parameter, spec: ParamSpec) -> str | None:
        """Return why a parameter cannot be stepped in parts, None when it can.

        Args:
            param: the live parameter.
            spec: the same as pure data.
        """
        if travels(spec) and not spec.splits:
            return f"{spec.optimizer!r} only steps whole tensors"
        return None

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
                f"sharding={self.name!r} steps what fully_shard has cut, but the model is wrapped in "
                "DistributedDataParallel: use one of the two"
            )
        layout = FsdpLayout(tuple(specs), world)
        layout.require_known_axes()
        return layout

    def attach(
        self,
        layout: ParamLayout,
        model: LiveModel,
        pgs: ProcessGroupCollection,
        groups: Sequence[int],
        *,
        is_expert: bool = False,
    ) -> LocalParams:
        """Return this rank's parts of the parameters in `groups`: a collective where their updates travel.

        Args:
            layout: what `layout` returned.
            model: the live model.
            pgs: the process groups.
            groups: indices of the routing's groups.
            is_expert: they hold expert parameters.
        """
        if not isinstance(layout, FsdpLayout):
            raise ShardingError(f"{self.name!r} cannot attach a {type(layout).__name__}")
        wanted = frozenset(groups)
        pieces = [local_piece(spec, model) for spec in layout.pieces(model.rank) if spec.group in wanted]
        params = LocalParams(model, pieces, pgs.sharded_stats_group(is_expert=is_expert))
        grid = layout.grid(is_expert=is_expert)
        buckets = layout.buckets(wanted, is_expert=is_expert)
        if buckets and grid.size > 1:
            stage = model.shared(grid, lambda: Stage.of(grid, model.rank, pgs))
            params.exchange = OwnerExchange(
                pieces,
                model.infos,
                routes_of(layout, stage, model.rank, wanted, is_expert=is_expert),
                [bucket.dtype for bucket in buckets],
                _device_of(model),
                Mail(stage.group),
            )
            params.told = params.exchange.travels(stage)
        return params


def _device_of(model: LiveModel) -> torch.device:
    return next((param.device for param in model.params.values()), torch.device("cpu"))
