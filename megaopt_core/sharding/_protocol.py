"""The protocol of sharding strategies: they say what a rank steps and move data; they never step."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch

from megaopt_core.errors import ShardingError
from megaopt_core.parallel._groups import ProcessGroupCollection
from megaopt_core.params._shards import AxisPlacement, RankCoordinates, Shard
from megaopt_core.params._specs import Granularity, ParamSpec
from megaopt_core.sharding._layout import FullParamLayout, LayoutOptions, PieceSpec, World
from megaopt_core.sharding._live_model import LiveModel, Piece
from megaopt_core.sharding._split_step import Exchange, Sent, Travel

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = [
    "OverlappedParams",
    "ParamLayout",
    "ShardedParams",
    "ShardingStrategy",
    "SharedStates",
    "spread_axes",
]


class ParamLayout(Protocol):
    """Who steps what: a pure result, equal on every rank of a pipeline stage.

    A layout may have a method `spread_axes(*, is_expert) -> tuple[str, ...]`: the axes along which ranks hold copies of
    the model, such as `"dp_replicate"`, and yet own different parameters. The stats group of what is attached then
    spans these axes too, and the first copy along each counts.
    """

    def pieces(self, rank: RankCoordinates) -> Sequence[PieceSpec]:
        """Return what a rank steps; it may hold several pieces of one parameter.

        Args:
            rank: the rank's coordinates.
        """


def spread_axes(layout: ParamLayout, *, is_expert: bool) -> tuple[str, ...]:
    """Return the axes along which ranks hold copies and own different parameters; none where a layout does not say.

    Args:
        layout: who steps what.
        is_expert: of expert parameters.
    """
    tell = getattr(layout, "spread_axes", None)
    return () if tell is None else tuple(tell(is_expert=is_expert))


class SharedStates(Protocol):
    """How torch's functions for state dicts see states that ranks have parts of, or that owners have of whole tensors.

    `keys` are the state keys that a split step keeps of whole tensors.
    """

    @property
    def of_all_params(self) -> bool:
        """Whether states come as slices also of a parameter that this rank has all of."""

    def group(self, keys: frozenset[str]) -> ProcessGroup | None:
        """Return the ranks that make a state dict together, and load it together; None: each does by itself.

        Args:
            keys: see the class.
        """

    def show(
        self,
        params: Mapping[str, torch.nn.Parameter],
        states: Mapping[str, MutableMapping[str, Any]],
        keys: frozenset[str],
    ) -> None:
        """Put what torch's functions understand in the place of slices, and what owners keep, on every rank.

        Args:
            params: all parameters by name, the same on all ranks.
            states: what this rank has of the state of each; changed in place.
            keys: see the class.

        Raises:
            StateDictError: the form cannot hold what owners keep; on all ranks.
        """

    def take(
        self,
        states: Mapping[str, Mapping[str, Any]],
        owned: Mapping[str, Sequence[Shard]],
        keys: frozenset[str],
    ) -> Mapping[str, Mapping[str, Any]]:
        """Return the states that this rank loads in place of those that :meth:`show` has put into a state dict.

        Args:
            states: what the state dict has of each parameter.
            owned: the whole tensors that this rank keeps a state of, by the name of their parameter.
            keys: see the class.

        Raises:
            StateDictError: ranks load different states.
        """


@runtime_checkable
class ShardedParams(Protocol):
    """This rank's live pieces of one inner optimizer.

    A class that inherits from it has no exchange and tells of no travels, unless it says otherwise.
    """

    exchange: Exchange | None = None
    """How updates travel to the owners of whole tensors and back, where the step is split; None: it is not."""

    takes_values_together: bool = False
    """`take_model_values` is a collective: all ranks of `stats_group` call it, or none."""

    brought_together: Sequence[torch.Tensor] = ()
    """What this rank holds of the model's values that reach a piece, here or elsewhere, by such a collective alone.
    Nobody but users writes to it between a step's end and the next step, which so notices what they wrote."""

    shared_states: SharedStates | None = None
    """How state dicts of torch's schema hold states that ranks have parts of; None: as slices, which only
    `torch.distributed.checkpoint` understands."""

    pieces: Sequence[Piece]
    """The pieces, grouped as the layout ordered them."""

    stats_group: ProcessGroup | None
    """The group over which norms and counts of the pieces add up to those of whole parameters."""

    def collect_grads(self) -> None:
        """Set every piece's `grad` for this step; wait for reductions that are under way."""

    def take_model_values(self) -> None:
        """Bring the model's values into pieces with memory of their own: somebody has changed them (a load, a user)."""

    def refuses_late(self, param: torch.nn.Parameter) -> str | None:
        """Return why a parameter that begins to train after the build cannot be taken in, None when it can.

        Args:
            param: the parameter.
        """
        return "its layout and memory are fixed when the optimizer is built"

    def take_in(self, piece: Piece) -> None:
        """Add a piece that this rank steps from now on.

        Args:
            piece: of a parameter that :meth:`refuses_late` has let pass.
        """
        raise ShardingError(f"{type(self).__name__} takes in no parameter after the build")

    def start_param_sync(self) -> None:
        """Begin to bring the updated pieces to every rank that needs them."""

    def finish_param_sync(self) -> None:
        """Return when every model parameter is up to date on this rank, or when its forward pass will wait for it."""

    def travels(self) -> Mapping[str, Travel]:
        """Return how the updates or gradients of parameters travel to their owners, and how many bytes; for reports."""
        return {}

    def sent(self) -> Sent | None:
        """Return what this rank has sent since the last step began, for reports; None: nobody counts."""
        return None


@runtime_checkable
class OverlappedParams(ShardedParams, Protocol):
    """Pieces that can be brought to other ranks a unit at a time, while the next unit is stepped.

    A strategy whose `supported_settings` names `overlap_param_gather_with_optimizer_step` attaches them.
    """

    units: Sequence[Sequence[int]]
    """Positions of the pieces of each unit, in the order of stepping; as many units on every rank, some empty."""

    def start_unit_sync(self, unit: int) -> None:
        """Begin to bring a unit's updated pieces to every rank that needs them.

        Args:
            unit: its position in :attr:`units`; each is begun once a step, in that order.
        """


@runtime_checkable
class ShardingStrategy(Protocol):
    """Says which pieces of which named parameters a rank steps, and moves data before and after.

    A strategy never subclasses an optimizer, never builds one, and never learns which one it shards: it reads
    granularity, alignment, cost and what the optimizer supports from the specs.

    A class that inherits from it has no fallback, supports no settings, refuses nothing, claims no model, plans no
    buffers and leaves the chain to the core, unless it says otherwise.
    """

    name: str
    """The registered name."""

    granularities: frozenset[Granularity]
    """Granularities that it can shard."""

    fallback: str | None = None
    """The strategy that takes parameters whose granularity this one cannot; None: there is none."""

    supported_settings: frozenset[str] = frozenset()
    """Core settings that it acts on, such as `overlap_param_gather`; a setting that nothing in use acts on raises."""

    def refuse(self, param: torch.nn.Parameter, spec: ParamSpec) -> str | None:
        """Return why this parameter cannot be sharded, None when it can.

        Args:
            param: the live parameter.
            spec: the same as pure data.
        """
        return None

    def claims(self, param: torch.nn.Parameter, placements: Sequence[AxisPlacement]) -> bool:
        """Return whether a model with this parameter is sharded by this strategy where the configuration names none.

        Args:
            param: a parameter that trains and that ranks divide, possibly on the meta device.
            placements: how the axes of the world divide it.
        """
        return False

    def buffers(
        self, specs: Sequence[ParamSpec], world: World, options: LayoutOptions
    ) -> FullParamLayout | None:
        """Return the buffers that these parameters should lie in, before a model is wrapped; None: it does not mind.

        Every strategy in use is asked with the parameters that are routed to it; a wrapped model has the union.

        Args:
            specs: what this rank has of the parameters, as whole tensors under the chunk's own names, in model order.
            world: number of ranks along each axis.
            options: bucket size and padding.
        """
        return None

    def layout(self, specs: Sequence[ParamSpec], world: World, options: LayoutOptions) -> ParamLayout:
        """Return who steps what: pure, the same on every rank of a pipeline stage.

        Args:
            specs: the parameters of all ranks of the stage, in model order; where `options.buffers` are given, of the
                ranks that have the same buffers.
            world: number of ranks along each axis.
            options: what else the layout depends on.
        """

    def attach(
        self,
        layout: ParamLayout,
        model: LiveModel,
        pgs: ProcessGroupCollection,
        groups: Sequence[int],
        *,
        is_expert: bool = False,
    ) -> ShardedParams:
        """Return this rank's live pieces of the parameters in `groups`.

        Args:
            layout: what `layout` returned.
            model: the live model; `layout.pieces(model.rank)` are this rank's.
            pgs: the process groups.
            groups: indices of the routing's groups that one inner optimizer steps.
            is_expert: they hold expert parameters, which have process groups of their own.
        """

    def chain(self, children: Sequence[Any]) -> Any:
        """Return the optimizer that a user gets; asked once, of the strategy that the configuration names.

        Args:
            children: every `MegatronOptimizer` of the model, at least one.

        Returns:
            A `MegatronOptimizer` over all of them; None: the only child, or a chain.
        """
        return None
