"""Matrices that tensor parallelism cuts: their parts go to one owner, and its values come back."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

import torch
from attrs import define, field, frozen

from megaopt_core import ProcessGroupCollection
from megaopt_core.params import AxisPlacement, Box, ParamSpec, Shard
from megaopt_core.sharding import LiveModel, Piece, PieceSpec, gradient_of
from megaopt_layerwise.fused_exchange import FusedExchange
from megaopt_layerwise.layout import LayerWiseLayout
from megaopt_layerwise.units import cutting, unit_box

__all__ = ["CutTensors"]


@frozen
class _CutTensor:
    """One matrix of which this rank holds a part.

    Args:
        spec: the parameter.
        unit: what its owner steps.
        parts: what each rank along the axis holds of it.
        owner: place of the owner along the axis.
    """

    spec: ParamSpec
    unit: Box
    parts: tuple[Shard, ...]
    owner: int

    @classmethod
    def of(cls, spec: ParamSpec, axis: AxisPlacement, owner: int, model: LiveModel) -> _CutTensor:
        parts = tuple(spec.shard({**model.rank, axis.axis: place}) for place in range(axis.size))
        return cls(spec, unit_box(spec, model.rank), parts, owner)

    def inside(self, whole: torch.Tensor, part: Shard) -> torch.Tensor:
        """Return a part of what the owner has, as a view."""
        view = whole.view(self.unit[1])
        for dim, (offset, size) in enumerate(zip(*part.box, strict=True)):
            view = view.narrow(dim, offset - self.unit[0][dim] if size else 0, size)
        return view


@define(eq=False)
class CutTensors:
    """The matrices of some groups that the ranks of another axis cut; of each one of them is the owner.

    All that travels in one direction goes in one message to each rank, however many matrices there are.

    Args:
        model: the live model.
        exchanges: by the axis that cuts, how messages travel along it.
        tensors: by the axis, the matrices whose owners stand where this rank does along the data axis.
        specs: this rank's own pieces.
    """

    model: LiveModel
    exchanges: Mapping[str, FusedExchange]
    tensors: Mapping[str, Sequence[_CutTensor]]
    specs: Sequence[PieceSpec]
    pieces: Mapping[PieceSpec, Piece] = field(init=False)

    def __attrs_post_init__(self) -> None:
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
        tensors: dict[str, list[_CutTensor]] = {}
        for spec in layout.specs.values():
            axis = cutting(spec)
            if axis is None or spec.group not in groups or spec.name not in model.params:
                continue
            owner = owners[spec.name]
            if owner.data == model.rank.get(spec.data_axis, 0):
                tensors.setdefault(axis.axis, []).append(_CutTensor.of(spec, axis, owner.cut, model))
        exchanges = {axis: FusedExchange.along(axis, pgs) for axis in sorted(tensors)}
        specs = [
            spec
            for spec in layout.pieces(model.rank)
            if spec.group in groups and spec.buffer is None and spec.peers is None
        ]
        return cls(model, exchanges, {axis: tensors[axis] for axis in exchanges}, specs)

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

    def store_values(self) -> None:
        """Bring the owners' values into the parts that each rank's model has."""
        by_name = {spec.members[0][1].name: piece.param.detach() for spec, piece in self.pieces.items()}
        for axis, exchange in self.exchanges.items():
            tensors = self.tensors[axis]
            mine = [tensor for tensor in tensors if tensor.owner == exchange.rank]
            leaving = [
                [tensor.inside(by_name[tensor.spec.name], tensor.parts[place]) for tensor in mine]
                for place in range(exchange.size)
            ]
            of_owner = [
                [tensor for tensor in tensors if tensor.owner == place] for place in range(exchange.size)
            ]
            expected = [
                [(tensor.parts[exchange.rank].numel, tensor.spec.dtype) for tensor in some]
                for some in of_owner
            ]
            arrived = exchange.run(leaving, expected, "parameters")
            for some, values in zip(of_owner, arrived, strict=True):
                for tensor, value in zip(some, values, strict=True):
                    self.model.store(tensor.parts[exchange.rank], value)

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

    def _grad(self, tensor: _CutTensor, part: Shard) -> tuple[torch.Tensor | None, torch.dtype]:
        return self.model.grad(part), _grad_dtype(self.model.params[tensor.spec.name])

    def _values(self, tensor: _CutTensor, part: Shard) -> tuple[torch.Tensor | None, torch.dtype]:
        return self.model.values(part), tensor.spec.dtype

    def _to_owners(
        self, get: Callable[[_CutTensor, Shard], tuple[torch.Tensor | None, torch.dtype]]
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
            arrived = exchange.run(leaving, expected, "gradients")
            for position, tensor in enumerate(mine):
                parts = [of_rank[position] for of_rank in arrived]
                is_there = any(of_rank[-1][position].item() for of_rank in arrived)
                wholes[tensor.spec.name] = _joined(tensor, parts) if is_there else None
        return wholes


def _filled(
    found: Sequence[tuple[torch.Tensor | None, torch.dtype]],
    tensors: Sequence[_CutTensor],
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


def _joined(tensor: _CutTensor, parts: Sequence[torch.Tensor]) -> torch.Tensor:
    whole = torch.empty(tensor.unit[1], dtype=parts[0].dtype, device=parts[0].device)
    for part, values in zip(tensor.parts, parts, strict=True):
        target = tensor.inside(whole, part)
        target.copy_(values.view(target.shape))
    return whole


def _grad_dtype(param: torch.nn.Parameter) -> torch.dtype:
    """Return the dtype in which a parameter's gradient travels, which is one on all ranks."""
    main_grad = getattr(param, "main_grad", None)
    return param.dtype if main_grad is None else gradient_of(param).dtype  # type: ignore[union-attr]


def _require(values: torch.Tensor | None) -> torch.Tensor:
    if values is None:
        raise ValueError("a parameter always has values")
    return values
