"""Matrices that tensor parallelism cuts: their parts go to one owner, and its values come back."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

import torch
from attrs import define, field, frozen

from megaopt_core import ProcessGroupCollection
from megaopt_core.params import Shard, local_tensor
from megaopt_core.sharding import LiveModel, Piece, PieceSpec, gradient_of
from megaopt_layerwise.cut_tensor import CutTensor, in_halves
from megaopt_layerwise.fused_exchange import FusedExchange, Travelling
from megaopt_layerwise.layout import LayerWiseLayout
from megaopt_layerwise.units import cutting

__all__ = ["CutTensors"]


@frozen
class _Returning:
    """Values on their way back to the parts that a rank has.

    Args:
        travelling: the message.
        of_owner: the matrices that come from each rank.
        rank: this rank's place.
    """

    travelling: Travelling
    of_owner: Sequence[Sequence[CutTensor]]
    rank: int


@define(eq=False)
class CutTensors:
    """The matrices of some groups that the ranks of another axis cut; of each one of them is the owner.

    All that travels in one direction goes in one message to each rank, however many matrices there are. Values may also
    come back in two, of which the first travels while the matrices of the second are stepped.

    Args:
        model: the live model.
        exchanges: by the axis that cuts, how messages travel along it.
        tensors: by the axis, the matrices whose owners stand where this rank does along the data axis.
        specs: this rank's own pieces.
        batches: in how many messages values may come back to a rank: 1 or 2.
    """

    model: LiveModel
    exchanges: Mapping[str, FusedExchange]
    tensors: Mapping[str, Sequence[CutTensor]]
    specs: Sequence[PieceSpec]
    batches: int = 1
    pieces: Mapping[PieceSpec, Piece] = field(init=False)
    _batch_of: Mapping[str, int] = field(init=False)
    _under_way: list[_Returning] = field(factory=list, init=False)

    def __attrs_post_init__(self) -> None:
        halves = [in_halves(tensors) for tensors in self.tensors.values()] if self.batches > 1 else []
        self._batch_of = {tensor.spec.name: 1 for _, later in halves for tensor in later}
        by_name = {spec.members[0][1].name: spec for spec in self.specs}
        arrived = self._to_owners(self._values)
        self.pieces = {
            by_name[name]: Piece(
                by_name[name], torch.nn.Parameter(_require(values)), (self.model.params[name],)
            )
            for name, values in arrived.items()
        }

    @classmethod
    def of(
        cls, layout: LayerWiseLayout, model: LiveModel, pgs: ProcessGroupCollection, groups: Collection[int]
    ) -> CutTensors:
        """Return the cut matrices of some groups: a collective over the axes that cut them.

        Args:
            layout: who owns what.
            model: the live model.
            pgs: the process groups.
            groups: indices of the routing's groups.
        """
        owners = layout.owners(model.rank)
        tensors: dict[str, list[CutTensor]] = {}
        for spec in layout.specs.values():
            axis = cutting(spec)
            if axis is None or spec.group not in groups or spec.name not in model.params:
                continue
            owner = owners[spec.name]
            if owner.data == model.rank.get(spec.data_axis, 0):
                tensors.setdefault(axis.axis, []).append(CutTensor.of(spec, axis, owner.cut, model))
        exchanges = {axis: FusedExchange.along(axis, pgs) for axis in sorted(tensors)}
        specs = [
            spec
            for spec in layout.pieces(model.rank)
            if spec.group in groups and spec.buffer is None and spec.peers is None
        ]
        kinds = {
            (spec.optimizer, spec.is_expert) for spec in layout.specs.values() if cutting(spec) is not None
        }
        # Gradients, and values in two messages; or both for each of two kinds: a step has four collectives at most.
        batches = 2 if len(kinds) == 1 else 1
        return cls(model, exchanges, {axis: tensors[axis] for axis in exchanges}, specs, batches)

    def batch_of(self, spec: PieceSpec) -> int:
        """Return with which message the values of a piece come back.

        Args:
            spec: one of this rank's pieces.
        """
        return self._batch_of.get(spec.members[0][1].name, 0)

    def collect_grads(self) -> None:
        """Bring the parts of every gradient to its owner; a part that is missing counts as zeros, all as none."""
        arrived = self._to_owners(self._grad)
        for spec, piece in self.pieces.items():
            piece.grad = arrived[spec.members[0][1].name]

    def take_model_values(self) -> None:
        """Bring the model's present values to the owners."""
        arrived = self._to_owners(self._values)
        with torch.no_grad():
            for spec, piece in self.pieces.items():
                piece.param.copy_(_require(arrived[spec.members[0][1].name]))

    def held(self) -> list[torch.Tensor]:
        """Return what this rank has of the matrices, in the memory of the model."""
        return [
            local_tensor(self.model.params[tensor.spec.name])
            for some in self.tensors.values()
            for tensor in some
        ]

    def start_values(self, batch: int | None = None) -> None:
        """Begin to bring the owners' values into the parts that each rank's model has.

        Args:
            batch: those of which message; None: of all, in one.
        """
        by_name = {spec.members[0][1].name: piece.param.detach() for spec, piece in self.pieces.items()}
        for axis, exchange in self.exchanges.items():
            of_owner: list[list[CutTensor]] = [[] for _ in range(exchange.size)]
            for tensor in self.tensors[axis]:
                if batch is None or self._batch_of.get(tensor.spec.name, 0) == batch:
                    of_owner[tensor.owner].append(tensor)
            leaving = [
                [
                    tensor.inside(by_name[tensor.spec.name], tensor.parts[place])
                    for tensor in of_owner[exchange.rank]
                ]
                for place in range(exchange.size)
            ]
            expected = [
                [(tensor.parts[exchange.rank].numel, tensor.spec.dtype) for tensor in some]
                for some in of_owner
            ]
            travelling = exchange.start(leaving, expected, "parameters", self._device)
            self._under_way.append(_Returning(travelling, of_owner, exchange.rank))

    def finish_values(self) -> None:
        """Write what comes back into the model, when it has arrived."""
        under_way, self._under_way = self._under_way, []
        for returning in under_way:
            for some, values in zip(returning.of_owner, returning.travelling.wait(), strict=True):
                for tensor, value in zip(some, values, strict=True):
                    self.model.store(tensor.parts[returning.rank], value)

    def bytes_sent(self) -> dict[str, int]:
        """Return how many bytes of each matrix this rank sends in a step, gradients and values together."""
        told = {}
        for axis, exchange in self.exchanges.items():
            for tensor in self.tensors[axis]:
                mine = tensor.parts[exchange.rank].numel
                if tensor.owner == exchange.rank:
                    others = sum(part.numel for part in tensor.parts) - mine
                    told[tensor.spec.name] = others * tensor.spec.dtype.itemsize
                else:
                    param = self.model.params[tensor.spec.name]
                    told[tensor.spec.name] = mine * _grad_dtype(param).itemsize
        return told

    @property
    def _device(self) -> torch.device:
        """Where this rank's parts lie, and so what travels, also where a gradient is missing."""
        some = next(iter(self.tensors.values()))[0]
        return self.model.params[some.spec.name].device

    def _grad(self, tensor: CutTensor, part: Shard) -> tuple[torch.Tensor | None, torch.dtype]:
        return self.model.grad(part), _grad_dtype(self.model.params[tensor.spec.name])

    def _values(self, tensor: CutTensor, part: Shard) -> tuple[torch.Tensor | None, torch.dtype]:
        return self.model.values(part), tensor.spec.dtype

    def _to_owners(
        self, get: Callable[[CutTensor, Shard], tuple[torch.Tensor | None, torch.dtype]]
    ) -> dict[str, torch.Tensor | None]:
        """Return what arrives of the matrices that this rank owns, None for those that no rank has anything of."""
        wholes: dict[str, torch.Tensor | None] = {}
        for axis, exchange in self.exchanges.items():
            tensors = self.tensors[axis]
            found = {tensor.spec.name: get(tensor, tensor.parts[exchange.rank]) for tensor in tensors}
            leaving = []
            for place in range(exchange.size):
                of_owner = [found[tensor.spec.name] for tensor in tensors if tensor.owner == place]
                leaving.append([*_filled(of_owner, tensors, exchange.rank, place), _presence(of_owner)])
            mine = [tensor for tensor in tensors if tensor.owner == exchange.rank]
            expected = [
                [
                    *((tensor.parts[place].numel, found[tensor.spec.name][1]) for tensor in mine),
                    (len(mine), torch.uint8),
                ]
                for place in range(exchange.size)
            ]
            arrived = exchange.start(leaving, expected, "gradients", self._device).wait()
            for position, tensor in enumerate(mine):
                parts = [of_rank[position] for of_rank in arrived]
                is_there = any(of_rank[-1][position].item() for of_rank in arrived)
                wholes[tensor.spec.name] = tensor.joined(parts) if is_there else None
        return wholes


def _filled(
    found: Sequence[tuple[torch.Tensor | None, torch.dtype]],
    tensors: Sequence[CutTensor],
    rank: int,
    place: int,
) -> list[torch.Tensor]:
    """Return what is sent to one owner: messages have one size, whatever has a gradient in this step."""
    owned = [tensor for tensor in tensors if tensor.owner == place]
    return [
        torch.zeros(tensor.parts[rank].numel, dtype=dtype) if value is None else value.to(dtype)
        for tensor, (value, dtype) in zip(owned, found, strict=True)
    ]


def _presence(found: Sequence[tuple[torch.Tensor | None, torch.dtype]]) -> torch.Tensor:
    return torch.tensor([value is not None for value, _ in found], dtype=torch.uint8)


def _grad_dtype(param: torch.nn.Parameter) -> torch.dtype:
    """Return the dtype in which a parameter's gradient travels, which is one on all ranks."""
    main_grad = getattr(param, "main_grad", None)
    return param.dtype if main_grad is None else gradient_of(param).dtype  # type: ignore[union-attr]


def _require(values: torch.Tensor | None) -> torch.Tensor:
    if values is None:
        raise ValueError("a parameter always has values")
    return values
