"""Parts of matrices that peers step and that are no range of memory: columns, where memory is cut into rows."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Literal

import torch
from attrs import define, field, frozen

from megaopt_core import ProcessGroupCollection
from megaopt_core.params import Box, ParamSpec, Shard, local_tensor
from megaopt_core.sharding import LiveModel, Piece, PieceSpec, gradient_of
from megaopt_layerwise.fused_exchange import FusedExchange
from megaopt_layerwise.layout import LayerWiseLayout
from megaopt_layerwise.planner import Division, Owners, peer_dim
from megaopt_layerwise.shares import memory_box, stepped_box

__all__ = ["PeerParts"]


@frozen
class _Parts:
    """One matrix that peers share: what each of them steps, and what each has in memory.

    Args:
        spec: the parameter.
        stepped: place of a rank to its columns.
        held: place of a rank to its rows.
    """

    spec: ParamSpec
    stepped: Mapping[int, Box]
    held: Mapping[int, Box]

    @classmethod
    def of(cls, spec: ParamSpec, box: Box, owners: Owners) -> _Parts:
        stepped = {rank: stepped_box(spec, box, owners, at) for at, rank in enumerate(owners.ranks)}
        held = {rank: memory_box(box, owners, at) for at, rank in enumerate(owners.ranks)}
        return cls(spec, stepped, held)

    def crossing(self, columns_of: int, rows_of: int) -> Shard | None:
        """Return what one rank steps of what another one has in memory; None where they do not share the matrix."""
        if columns_of not in self.stepped or rows_of not in self.held:
            return None
        (_, *offsets), (_, *sizes) = self.stepped[columns_of]
        (first, *_), (rows, *_) = self.held[rows_of]
        return self.spec.part(((first, *offsets), (rows, *sizes)))


@define(eq=False)
class PeerParts:
    """The columns that this rank steps of matrices which peers share.

    Where gradients are reduce-scattered, each peer has rows of them, and the peers exchange rows for columns; else
    every rank has whole gradients, and takes its columns. After the step columns go back into rows, which lie in flat
    memory and are gathered like everything else there. All matrices travel in one message to each rank.

    Args:
        model: the live model.
        exchanges: by data-parallel axis, how messages travel along it.
        tensors: by the axis, the matrices that are cut into columns, on any of its ranks.
        specs: this rank's own pieces.
        scattered: gradients are reduced to those who have their rows.
    """

    model: LiveModel
    exchanges: Mapping[str, FusedExchange]
    tensors: Mapping[str, Sequence[_Parts]]
    specs: Sequence[PieceSpec]
    scattered: bool
    pieces: Mapping[PieceSpec, Piece] = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.pieces = {spec: self.model.new_piece(spec) for spec in self.specs}

    @classmethod
    def of(
        cls, layout: LayerWiseLayout, model: LiveModel, pgs: ProcessGroupCollection, groups: Collection[int]
    ) -> PeerParts:
        """Return the columns of some groups.

        Args:
            layout: who owns what.
            model: the live model.
            pgs: the process groups.
            groups: indices of the routing's groups.
        """
        owners = layout.owners(model.rank)
        tensors: dict[str, list[_Parts]] = {}
        for spec in layout.specs.values():
            if spec.group not in groups or spec.name not in model.params:
                continue
            shared = owners[spec.name].shared
            if shared.division is Division.PEERS and peer_dim(spec) != 0:
                parts = _Parts.of(spec, spec.box(model.rank), shared)
                tensors.setdefault(spec.data_axis, []).append(parts)
        specs = [
            spec
            for spec in layout.pieces(model.rank)
            if spec.group in groups and spec.buffer is None and spec.peers is not None
        ]
        exchanges = {axis: FusedExchange.along(axis, pgs) for axis in sorted(tensors)}
        return cls(model, exchanges, tensors, specs, layout.fused)

    def collect_grads(self) -> None:
        """Take the columns of every gradient, or receive them from the peers that have rows."""
        if not self.scattered:
            for spec, piece in self.pieces.items():
                grad = self.model.grad(spec.members[0][1])
                piece.grad = None if grad is None else grad.view(spec.shape)
            return
        grads = {
            spec.members[0][1].name: torch.empty(
                spec.shape, dtype=self._grad_dtype(spec), device=piece.param.device
            )
            for spec, piece in self.pieces.items()
        }
        for axis, exchange in self.exchanges.items():
            for parts, shard, values in self._exchanged(axis, "gradients", self._grad):
                target = _inside(grads[parts.spec.name], parts.stepped[exchange.rank], shard)
                target.copy_(values.view(target.shape))
        for spec, piece in self.pieces.items():
            piece.grad = grads[spec.members[0][1].name]

    def take_model_values(self) -> None:
        """Bring the model's present values into the columns."""
        for piece in self.pieces.values():
            self.model.fill(piece)

    def held(self) -> list[torch.Tensor]:
        """Return the rows that this rank has in memory, which nobody else writes to, as views of the model's."""
        rows = []
        for axis, exchange in self.exchanges.items():
            for parts in self.tensors[axis]:
                if exchange.rank in parts.held:
                    (first, *_), (count, *_) = parts.held[exchange.rank]
                    (start, *_), _ = self.model.box(parts.spec.name)
                    param = local_tensor(self.model.params[parts.spec.name]).detach()
                    rows.append(param.narrow(0, first - start, count))
        return rows

    def store_values(self) -> None:
        """Bring the columns that were stepped into the rows that each peer has in memory."""
        stepped = {spec.members[0][1].name: piece.param.detach() for spec, piece in self.pieces.items()}
        for axis, exchange in self.exchanges.items():

            def values_of(parts: _Parts, shard: Shard, mine: int = exchange.rank) -> torch.Tensor:
                return _inside(stepped[parts.spec.name], parts.stepped[mine], shard)

            for _, shard, values in self._exchanged(axis, "parameters", values_of):
                self.model.store(shard, values)

    def bytes_sent(self) -> dict[str, int]:
        """Return how many bytes of each matrix this rank sends to its peers in a step, in both directions."""
        told = {}
        for axis, exchange in self.exchanges.items():
            for parts in self.tensors[axis]:
                mine = exchange.rank
                back = [parts.crossing(mine, place) for place in parts.held if place != mine]
                out = [parts.crossing(place, mine) for place in parts.held if place != mine]
                there = [*back, *(out if self.scattered else ())]
                told[parts.spec.name] = (
                    sum(shard.numel for shard in there if shard) * parts.spec.dtype.itemsize
                )
        return told

    def _exchanged(
        self,
        axis: str,
        what: Literal["gradients", "parameters"],
        get: Callable[[_Parts, Shard], torch.Tensor],
    ) -> Iterator[tuple[_Parts, Shard, torch.Tensor]]:
        """Send gradients from rows to columns, or parameters from columns to rows, and yield what has come."""
        exchange, tensors = self.exchanges[axis], self.tensors[axis]

        def travelling(sender: int, receiver: int) -> list[tuple[_Parts, Shard]]:
            rows, columns = (sender, receiver) if what == "gradients" else (receiver, sender)
            crossings = [(parts, parts.crossing(columns, rows)) for parts in tensors]
            return [(parts, shard) for parts, shard in crossings if shard is not None]

        places = range(exchange.size)
        leaving = [
            [get(parts, shard) for parts, shard in travelling(exchange.rank, place)] for place in places
        ]
        coming = [travelling(place, exchange.rank) for place in places]
        dtype_of = self._grad_dtype_of if what == "gradients" else _dtype_of
        expected = [[(shard.numel, dtype_of(parts.spec)) for parts, shard in some] for some in coming]
        arrived = exchange.run(leaving, expected, what)
        for some, tensors_here in zip(coming, arrived, strict=True):
            for (parts, shard), values in zip(some, tensors_here, strict=True):
                yield parts, shard, values

    def _grad(self, parts: _Parts, shard: Shard) -> torch.Tensor:
        grad = self.model.grad(shard)
        if grad is None:  # a buffer has one for each of its parameters
            device = self.model.params[parts.spec.name].device
            return torch.zeros(shard.numel, dtype=self._grad_dtype_of(parts.spec), device=device)
        return grad

    def _grad_dtype(self, spec: PieceSpec) -> torch.dtype:
        return self._dtype_of_grad(spec.members[0][1].name)

    def _grad_dtype_of(self, spec: ParamSpec) -> torch.dtype:
        return self._dtype_of_grad(spec.name)

    def _dtype_of_grad(self, name: str) -> torch.dtype:
        param = self.model.params[name]
        grad = gradient_of(param)
        return param.dtype if grad is None else grad.dtype


def _dtype_of(spec: ParamSpec) -> torch.dtype:
    return spec.dtype


def _inside(part: torch.Tensor, box: Box, shard: Shard) -> torch.Tensor:
    """Return some elements of a part, as a view."""
    view = part
    for dim, (offset, size) in enumerate(zip(*shard.box, strict=True)):
        view = view.narrow(dim, offset - box[0][dim], size)
    return view
