"""Transforms after a step, and the pieces that they write to."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from attrs import field, frozen

from megaopt_core.errors import PluginError, ShardingError
from megaopt_core.parallel._agreement import Comparison
from megaopt_core.params._names import shown
from megaopt_core.params._roles import Role
from megaopt_core.params._shards import Shard
from megaopt_core.params._specs import Granularity
from megaopt_core.params._views import MatrixView
from megaopt_core.plugin_api._after_step import AfterStep
from megaopt_core.plugin_api._observers import ReportLine
from megaopt_core.precision._policy import PrecisionPolicy
from megaopt_core.registry._faults import call_blaming
from megaopt_core.registry._infos import PluginInfo
from megaopt_core.registry._registry import get_registry

if TYPE_CHECKING:
    from megaopt_core.optimizers._base import MegatronOptimizer

__all__ = ["Transforms"]


@frozen(eq=False)
class SteppedElements:
    """Elements of one named parameter in a piece: a `NamedPiece`.

    Args:
        shard: which elements.
        view: how the parameter is seen as matrices.
        precision: keeps the piece's value.
        index: position of the piece.
        offset: where the elements begin in the piece, row by row.
        noop: on the device, 1.0 where nothing is to change; None: what is written changes.
    """

    shard: Shard
    view: MatrixView | None
    precision: PrecisionPolicy
    index: int
    offset: int
    noop: torch.Tensor | None

    @property
    def name(self) -> str:
        """The parameter's canonical name."""
        return self.shard.name

    @property
    def value(self) -> torch.Tensor:
        """The main values: of the box's shape where these are all of a box, else flat."""
        values = self.precision.value(self.index).reshape(-1)[self._span]
        return values.view(self.shard.box[1]) if self.shard.is_box else values

    @property
    def _span(self) -> slice:
        return slice(self.offset, self.offset + self.shard.numel)

    def copy_(self, values: torch.Tensor) -> None:
        """Write values in the order of :attr:`value`."""
        whole = self.precision.value(self.index).clone(memory_format=torch.contiguous_format)
        elements = whole.view(-1)[self._span]
        written = values.reshape(-1).to(whole)
        elements.copy_(written if self.noop is None else torch.where(self.noop == 1.0, elements, written))
        self.precision.set_value(self.index, whole)

    def scale_(self, factor: float | torch.Tensor) -> None:
        """Multiply all values."""
        self.copy_(self.value * factor)

    def scale_rows(self, factors: torch.Tensor) -> None:
        """Multiply each value by the factor of its row of the whole parameter."""
        if factors.shape != self.shard.shape[:1]:
            raise PluginError(
                f"scale_rows: {self.name!r} has shape {self.shard.shape}, got factors of shape {tuple(factors.shape)}; "
                "give one for each row of the whole parameter"
            )
        (first, *_), (_, *row) = self.shard.box
        elements = torch.arange(self.shard.start, self.shard.stop, device=factors.device)
        of_row = torch.Size(row).numel()
        value = self.value
        self.copy_(value * factors[first + elements // of_row].to(value).view(value.shape))


@frozen(eq=False)
class Transforms:
    """The transforms of one optimizer, with the plugins that brought them, in the same order on every rank.

    Args:
        members: plugin and transform.
    """

    members: Sequence[tuple[PluginInfo, AfterStep]] = field(default=())

    @classmethod
    def of(cls, optimizer: MegatronOptimizer) -> Transforms:
        """Ask all plugins for the transforms of an optimizer.

        Args:
            optimizer: the optimizer whose `step` is called.

        Raises:
            PluginError: a plugin failed, or gave something else.
            ShardingError: a transform needs whole tensors, and this rank steps a part of a hidden matrix.
        """
        members: list[tuple[PluginInfo, AfterStep]] = []
        for plugin, given in get_registry().call_each("megaopt_after_step", optimizer=optimizer):
            for each in given:
                kind = getattr(each, "granularity", None)
                if not callable(each) or kind not in (Granularity.ELEMENT, Granularity.TENSOR):
                    raise PluginError(
                        f"megaopt_after_step of {plugin} returned {each!r}; it must be callable and have granularity "
                        "Granularity.ELEMENT or Granularity.TENSOR"
                    )
                members.append((plugin, each))
        found = cls(members)
        found.require_whole_matrices(optimizer)
        return found

    def require_whole_matrices(self, optimizer: MegatronOptimizer) -> None:
        """Raise where a transform needs whole tensors, and this rank steps a part of a hidden matrix.

        Args:
            optimizer: what is stepped.

        Raises:
            ShardingError: it names the plugin, and the matrices.
        """
        whole = [plugin for plugin, each in self.members if each.granularity is Granularity.TENSOR]
        routes = {} if optimizer.routing is None else optimizer.routing.params
        cut = [
            piece.name
            for piece in (_pieces_of(optimizer) if whole else ())
            if not piece.shard.is_whole
            and piece.name in routes
            and routes[piece.name].decision.role is Role.MATRIX
        ]
        if cut:
            raise ShardingError(
                f"a transform of {whole[0]} after a step needs whole matrices, and ranks share the elements of "
                f"{shown([*map(repr, dict.fromkeys(cut))])}: choose a strategy that keeps them whole (replicated, "
                "layer_wise), or uninstall the plugin"
            )

    def alike(self) -> Comparison:
        """Return what all ranks must have alike: which transforms there are."""
        rows = [(_called(each), {"of": str(plugin)}) for plugin, each in self.members]
        return Comparison.of_rows("the transforms after a step", rows, None)

    def apply(self, optimizer: MegatronOptimizer, noop: torch.Tensor | None = None) -> None:
        """Let all transforms write.

        Args:
            optimizer: what has been stepped.
            noop: on the device, 1.0 where the step has changed nothing, and they are not to either.

        Raises:
            PluginError: one failed; the message names its plugin.
        """
        pieces = _pieces_of(optimizer, noop)
        whole = [piece for piece in pieces if piece.shard.is_whole]
        for plugin, transform in self.members:
            given = whole if transform.granularity is Granularity.TENSOR else pieces
            call_blaming(partial(_failed, plugin, transform), transform, given)

    def report_lines(self, *, overlaps: bool) -> list[ReportLine]:
        """Return a line for each transform, and one where parameters would have been gathered meanwhile.

        Args:
            overlaps: the configuration asks for that.
        """
        lines = [ReportLine("after a step", f"{_called(each)} of {plugin}") for plugin, each in self.members]
        if lines and overlaps:
            off = "overlap_param_gather_with_optimizer_step is off: transforms write before parameters are gathered"
            lines.append(ReportLine("after a step", off))
        return lines


def _called(transform: AfterStep) -> str:
    return f"transform {getattr(transform, '__name__', type(transform).__name__)}"


def _failed(plugin: PluginInfo, transform: AfterStep) -> str:
    return f"{_called(transform)} of {plugin} failed"


def _pieces_of(optimizer: MegatronOptimizer, noop: torch.Tensor | None = None) -> list[SteppedElements]:
    """Return the elements of every parameter that this rank steps."""
    routes = {} if optimizer.routing is None else optimizer.routing.params
    return [
        SteppedElements(
            shard,
            routes[shard.name].decision.view if shard.name in routes else None,
            part.precision,
            index,
            offset,
            noop,
        )
        for part in optimizer.parts
        for index, piece in enumerate(part.pieces)
        for offset, shard in piece.spec.members
        if shard.numel
    ]
