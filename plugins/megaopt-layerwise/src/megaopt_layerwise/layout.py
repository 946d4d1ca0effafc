"""Who owns which matrix, as pure data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from attrs import define, evolve, field
from megaopt_distributed import LayoutInBuffers

from megaopt_core.params import ParamSpec, RankCoordinates
from megaopt_core.sharding import BufferKey, LayoutOptions, Peers, PerBufferParamLayout, PieceSpec, World
from megaopt_layerwise.buffers import key_of, lay_out_segments
from megaopt_layerwise.data_places import DataPlaces
from megaopt_layerwise.owner_places import Owner, is_at, owners_where_cut
from megaopt_layerwise.owners_in_buffers import owners_in_buffers, require_in_buffers
from megaopt_layerwise.planner import CostModel, Division, Owners, peer_dim
from megaopt_layerwise.shares import memory_shares, stepped_box
from megaopt_layerwise.units import cutting, unit_box
from megaopt_layerwise.works import work_at

__all__ = ["LayerWiseLayout"]

type _Placed = tuple[BufferKey, str, int, int, int]
"""A share of a matrix in memory: its buffer, name, which of its owners has it, and where it begins and ends there."""

_SHARED_AXES = frozenset({"ep", "expert_tp", "dp", "dp_replicate", "expert_dp", "expert_dp_replicate"})
"""Axes whose ranks have the same dense matrices, whichever experts they have."""


@define(eq=False)
class LayerWiseLayout(LayoutInBuffers):
    """Every matrix has one owner among the ranks that hold it or a part of it, or a few that share it.

    Where data-parallel ranks hold whole matrices, an owner's piece is a range of a buffer in which the matrices of one
    owner lie together. Where another axis cuts a matrix, its parts lie in the share of the owner's place along the data
    axis, and the owner steps the whole in memory of its own.

    Of a batch each of several owners steps whole matrices. Peers step parts of one matrix: rows where Gram matrices are
    summed over rows, which are ranges of a buffer, and else columns, in memory of their own.

    Args:
        specs: name to parameter.
        world: number of ranks along each axis.
        options: the buffers that the model is wrapped in; without them owners are balanced over the whole model.
        model: weighs operations against exchanged bytes.

    Raises:
        ShardingError: the model is wrapped in buffers that lack a parameter, or cut one.
    """

    specs: Mapping[str, ParamSpec]
    world: World
    options: LayoutOptions
    model: CostModel = field(factory=CostModel)
    _telling: tuple[str, ...] = field(init=False)
    _axes: tuple[str, ...] = field(init=False)
    _owners: dict[tuple[int, ...], Mapping[str, Owner]] = field(factory=dict, init=False)
    _buffers: dict[tuple[int, ...], Mapping[BufferKey, PerBufferParamLayout]] = field(
        factory=dict, init=False
    )
    _places: dict[tuple[tuple[str, int], ...], DataPlaces] = field(factory=dict, init=False)
    _owned: dict[tuple[int, ...], dict[tuple[str, int], list[_Placed]]] = field(factory=dict, init=False)

    def __attrs_post_init__(self) -> None:
        dividing = [placement for spec in self.specs.values() for placement in spec.dividing]
        self._telling = tuple(sorted({each.axis for each in dividing if each.index is not None}))
        self._axes = tuple(sorted({each.axis for each in dividing}))
        if self.options.buffers is not None:
            require_in_buffers(self.specs, self.options.buffers, self.shards)

    def owners(self, rank: RankCoordinates) -> Mapping[str, Owner]:
        """Return the owner of every matrix that a rank holds, or holds a part of.

        Args:
            rank: its coordinates.
        """
        place = tuple(rank.get(axis, 0) for axis in self._telling)
        if place not in self._owners:
            at = dict(zip(self._telling, place, strict=True))
            held = [spec for spec in self.specs.values() if is_at(spec, at)]
            data = self._data_places(held, at)
            experts_at = (at.get("ep", 0), self.world.size("ep"))
            self._owners[place] = owners_where_cut(held, data, experts_at)
        return self._owners[place]

    def _data_places(self, specs: Sequence[ParamSpec], rank: RankCoordinates) -> Mapping[str, Owners]:
        if self.options.buffers is not None:
            return owners_in_buffers(self.specs, self.options.buffers, self.shards)
        stage = {axis: rank.get(axis, 0) for axis in ("pp", *self._telling) if axis not in _SHARED_AXES}
        key = tuple(stage.items())
        if key not in self._places:
            # The same on every rank of a stage: dense owners must not depend on which experts a rank has.
            experts = [spec for spec in self.specs.values() if spec.is_expert]
            places = [{**stage, **at} for at in self.world.ranks("ep", "expert_tp")]
            works = [[work_at(spec, at) for spec in experts if is_at(spec, at, at)] for at in places]
            dense = [work_at(spec, rank) for spec in specs if not spec.is_expert]
            self._places[key] = DataPlaces(dense, works, self.world, self.model)
        place = rank.get("ep", 0) * self.world.size("expert_tp") + rank.get("expert_tp", 0)
        return self._places[key].at(place)

    def buffers(self, rank: RankCoordinates) -> Mapping[BufferKey, PerBufferParamLayout]:
        """Return where a rank's parameters lie.

        Args:
            rank: its coordinates.
        """
        if self.options.buffers is not None:
            return self.options.buffers
        place = tuple(rank.get(axis, 0) for axis in self._axes)
        if place not in self._buffers:
            by_key: dict[BufferKey, list[ParamSpec]] = {}
            for spec in self.specs.values():
                if spec.held_by(rank):
                    local = evolve(spec, shape=spec.box(rank)[1], placements=())
                    by_key.setdefault(key_of(spec, self.options.chunk_of.get(spec.name, 0)), []).append(local)
            places = {name: owner.shared for name, owner in self.owners(rank).items()}
            self._buffers[place] = {
                key: lay_out_segments([specs], places, self.shards(key)) for key, specs in by_key.items()
            }
        return self._buffers[place]

    def pieces(self, rank: RankCoordinates) -> Sequence[PieceSpec]:
        """Return what a rank owns: ranges of memory in their order, then columns of peers, then what other axes cut.

        Args:
            rank: its coordinates.
        """
        owners = self.owners(rank)
        whole: list[PieceSpec] = []
        parts: list[PieceSpec] = []
        cut: list[PieceSpec] = []
        for key, name, index, begin, end in self._owned_at(rank):
            spec, owner = self.specs[name], owners[name]
            axis = cutting(spec)
            if axis is None:
                piece = _piece(spec, rank, owner.shared, index, (key, begin, end))
                (parts if piece.buffer is None else whole).append(piece)
            elif owner.cut == rank.get(axis.axis, 0):
                cut.append(PieceSpec.of(spec.part(unit_box(spec, rank)), spec.group))
        return whole + parts + cut

    def _owned_at(self, rank: RankCoordinates) -> list[_Placed]:
        """Return what the owners at a rank's place along the data axes own, in the order of memory."""
        place = tuple(rank.get(axis, 0) for axis in self._axes)
        if place not in self._owned:
            owners = self.owners(rank)
            found: dict[tuple[str, int], list[_Placed]] = {}
            for key, buffer in self.buffers(rank).items():
                for name, (begin, _) in sorted(buffer.param_ranges.items(), key=lambda entry: entry[1]):
                    spec = self.specs.get(name)
                    if spec is None:
                        continue
                    position = begin
                    for index, (at, numel) in enumerate(
                        memory_shares(spec.box(rank)[1], owners[name].shared)
                    ):
                        mine = found.setdefault((spec.data_axis, at), [])
                        mine.append((key, name, index, position, position + numel))
                        position += numel
            self._owned[place] = found
        owned = self._owned[place]
        return [each for axis in ("dp", "expert_dp") for each in owned.get((axis, rank.get(axis, 0)), ())]


def _piece(
    spec: ParamSpec, rank: RankCoordinates, owners: Owners, index: int, buffer: tuple[BufferKey, int, int]
) -> PieceSpec:
    """Return what one owner of a matrix that nothing cuts steps."""
    if owners.division is Division.WHOLE:
        shard = spec.shard(rank)
        return PieceSpec(spec.group, shard.box[1], ((0, shard),), buffer)
    box = stepped_box(spec, spec.box(rank), owners, index)
    shard, dim = spec.part(box), peer_dim(spec)
    if owners.division is Division.MATRICES:
        return PieceSpec(spec.group, box[1], ((0, shard),), buffer)
    peers = Peers(spec.data_axis, len(owners.ranks), index, dim)
    return PieceSpec(spec.group, box[1], ((0, shard),), buffer if dim == 0 else None, peers)
