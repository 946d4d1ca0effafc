"""The strategy `distributed`: each rank steps an equal flat slice of every bucket (ZeRO-1)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from attrs import evolve, frozen

from megaopt_core import Granularity, ParamSpec, ProcessGroupCollection, ShardingStrategy
from megaopt_core.errors import ShardingError
from megaopt_core.sharding import FullParamLayout, LayoutOptions, LiveModel, ParamLayout, World
from megaopt_distributed.buffers.buffer_layout import default_bucket_size, lay_out_buffers
from megaopt_distributed.layout import FlatLayout
from megaopt_distributed.memory import memory_of
from megaopt_distributed.params import DistributedParams

__all__ = ["Distributed"]


@frozen
class Distributed(ShardingStrategy):
    """Optimizer states and main parameters are shared out over the data-parallel ranks, element by element.

    With megaopt's `DistributedDataParallel(use_distributed_optimizer=True)` gradients are reduce-scattered in buckets
    and pieces are views into its buffers. Otherwise (torch's own DDP, or gradients that someone else has reduced)
    parameters move into flat memory of the strategy's own and gradients are read from `param.grad`.

    Args:
        name: the registered name.
    """

    name: str = "distributed"
    granularities: frozenset[Granularity] = frozenset({Granularity.ELEMENT})
    fallback: str | None = "layer_wise"
    supported_settings: frozenset[str] = frozenset(
        {"overlap_param_gather", "overlap_param_gather_with_optimizer_step"}
    )

    def refuse(self, param: torch.nn.Parameter, spec: ParamSpec) -> str | None:
        """Return why a parameter cannot be cut into flat slices, None when it can.

        Args:
            param: the live parameter.
            spec: the same as pure data.
        """
        if type(param.data) is not torch.Tensor:
            return f"it is a {type(param.data).__name__}, which has no flat memory"
        if spec.divided_over_data:
            return "it is sharded over the data-parallel ranks already"
        return None

    def buffers(
        self, specs: Sequence[ParamSpec], world: World, options: LayoutOptions
    ) -> FullParamLayout | None:
        """Return buffers whose buckets can be cut as the optimizers of these parameters allow.

        Args:
            specs: what this rank has of the parameters, in model order.
            world: how many ranks share the parameters out.
            options: bucket size and padding.
        """
        return FullParamLayout(lay_out_buffers(specs, world, options))

    def layout(self, specs: Sequence[ParamSpec], world: World, options: LayoutOptions) -> ParamLayout:
        """Return who steps what.

        Args:
            specs: the parameters, in model order.
            world: how many ranks share the parameters out.
            options: the buffers that the model is wrapped in, or how to divide memory of our own.

        Raises:
            ShardingError: the model is wrapped in buffers that lack a parameter.
        """
        by_name = {spec.name: spec for spec in specs}
        if options.buffers is None:
            size = options.bucket_size or default_bucket_size(world.size("dp"))
            return FlatLayout(by_name, world, evolve(options, bucket_size=size))
        present = {name for buffer in options.buffers.values() for name in buffer.param_ranges}
        here = [spec.name for spec in specs if not any(at.index is not None for at in spec.dividing)]
        absent = [name for name in here if name not in present]
        if absent:
            raise ShardingError(
                f"{len(absent)} trainable parameters are not in the buffers of the wrapped model: "
                f"{', '.join(absent[:5])}; wrap the model after its parameters are chosen to train"
            )
        return FlatLayout(by_name, world, options)

    def attach(
        self,
        layout: ParamLayout,
        model: LiveModel,
        pgs: ProcessGroupCollection,
        groups: Sequence[int],
        *,
        is_expert: bool = False,
    ) -> DistributedParams:
        """Return this rank's slices of the parameters in `groups`.

        Args:
            layout: what `layout` returned.
            model: the live model.
            pgs: the process groups.
            groups: indices of the routing's groups.
            is_expert: they hold expert parameters.
        """
        if not isinstance(layout, FlatLayout):
            raise ShardingError(f"{self.name!r} cannot attach a {type(layout).__name__}")
        wanted = set(groups)
        specs = [spec for spec in layout.pieces(model.rank) if spec.group in wanted]
        stats_group = pgs.sharded_stats_group(is_expert=is_expert)
        return DistributedParams(memory_of(layout, model, pgs), specs, tuple(groups), stats_group)
