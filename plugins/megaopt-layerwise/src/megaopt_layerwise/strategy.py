"""The strategy `layer_wise`: every matrix is stepped whole, by one owner."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from attrs import field, frozen
from megaopt_distributed import memory_of

from megaopt_core import Granularity, MegatronOptimizer, ParamSpec, ProcessGroupCollection, ShardingStrategy
from megaopt_core.errors import ShardingError
from megaopt_core.sharding import FullParamLayout, LayoutOptions, LiveModel, ParamLayout, World
from megaopt_layerwise.buffers import lay_out_buckets
from megaopt_layerwise.cut_tensors import CutTensors
from megaopt_layerwise.layout import LayerWiseLayout
from megaopt_layerwise.params import LayerWiseParams
from megaopt_layerwise.peer_parts import PeerParts
from megaopt_layerwise.planner import CostModel
from megaopt_layerwise.routes import routes_of
from megaopt_layerwise.units import cutting_axes

__all__ = ["LayerWise"]


@frozen
class LayerWise(ShardingStrategy):
    """Every matrix has one owner among the ranks that hold it, which steps it whole and alone has its state.

    Owners are balanced by the cost of a step. Gradients arrive at owners reduced: under megaopt's
    `DistributedDataParallel(use_distributed_optimizer=True)`, planned for this routing, they are reduce-scattered to
    them; under any other wrapper every rank has them all. Updated values go from each owner to all data-parallel ranks
    as one contiguous segment. A matrix that tensor parallelism cuts goes to its owner and back in one fused all-to-all
    a direction.

    Of a batch of experts each of several ranks may step some. Where ranks outnumber matrices, or one matrix outweighs
    the others, a few data-parallel ranks step parts of it together, if the cost model expects a shorter step of that or
    `peers_per_matrix` asks for it.

    Args:
        name: the registered name.
        model: weighs operations against the bytes and messages that peers exchange.
    """

    name: str = "layer_wise"
    model: CostModel = field(factory=CostModel)
    granularities: frozenset[Granularity] = frozenset({Granularity.TENSOR})
    fallback: str | None = "distributed"
    supported_settings: frozenset[str] = frozenset(
        {"overlap_param_gather", "overlap_param_gather_with_optimizer_step", "peers_per_matrix"}
    )

    def refuse(self, param: torch.nn.Parameter, spec: ParamSpec) -> str | None:
        """Return why a parameter cannot have one owner, None when it can.

        Args:
            param: the live parameter.
            spec: the same as pure data.
        """
        if hasattr(param.data, "device_mesh"):
            return (
                f"it is a {type(param.data).__name__}, which has no flat memory; sharding='fsdp' (megaopt-fsdp) steps "
                "DTensors, whole on owners among all ranks that hold a part, whichever axes cut them"
            )
        if type(param.data) is not torch.Tensor:
            return f"it is a {type(param.data).__name__}, which has no flat memory"
        if spec.divided_over_data:
            return "it is sharded over the data-parallel ranks already"
        axes = cutting_axes(spec)
        if len(axes) > 1:
            return f"its matrices are cut along {len(axes)} axes at once: {', '.join(axes)}"
        return None

    def buffers(
        self, specs: Sequence[ParamSpec], world: World, options: LayoutOptions
    ) -> FullParamLayout | None:
        """Return buffers in which no matrix crosses the share of a rank.

        Args:
            specs: what this rank has of the parameters, in model order.
            world: how many ranks share the parameters out.
            options: bucket size and padding.
        """
        return FullParamLayout(lay_out_buckets(specs, world, options, self.model))

    def layout(self, specs: Sequence[ParamSpec], world: World, options: LayoutOptions) -> ParamLayout:
        """Return who owns what.

        Args:
            specs: the parameters, in model order.
            world: how many ranks there are along each axis.
            options: the buffers that the model is wrapped in, or none.

        Raises:
            ShardingError: the model is wrapped in buffers that lack a parameter, or cut one.
        """
        return LayerWiseLayout({spec.name: spec for spec in specs}, world, options, self.model)

    def attach(
        self,
        layout: ParamLayout,
        model: LiveModel,
        pgs: ProcessGroupCollection,
        groups: Sequence[int],
        *,
        is_expert: bool = False,
    ) -> LayerWiseParams:
        """Return the matrices of `groups` that this rank owns.

        Args:
            layout: what `layout` returned.
            model: the live model.
            pgs: the process groups.
            groups: indices of the routing's groups.
            is_expert: they hold expert parameters.
        """
        if not isinstance(layout, LayerWiseLayout):
            raise ShardingError(f"{self.name!r} cannot attach a {type(layout).__name__}")
        wanted = set(groups)
        specs = [spec for spec in layout.pieces(model.rank) if spec.group in wanted]
        return LayerWiseParams(
            memory=memory_of(layout, model, pgs),
            cut=CutTensors.of(layout, model, pgs, wanted),
            parts=PeerParts.of(layout, model, pgs, wanted),
            specs=specs,
            groups=tuple(groups),
            stats_group=pgs.sharded_stats_group(is_expert=is_expert),
            routes=routes_of(layout, model, wanted),
        )

    def chain(self, children: Sequence[MegatronOptimizer]) -> MegatronOptimizer:
        """Return the optimizer that a user gets.

        Args:
            children: every optimizer of the model.
        """
        from megaopt_layerwise.optimizer import LayerWiseDistributedOptimizer

        first = children[0]
        return LayerWiseDistributedOptimizer(children, first.config, first.process_groups)
