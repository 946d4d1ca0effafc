"""Layouts know granularity: what an optimizer must see whole is not cut, and a piece has its box's shape."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from attrs import frozen
from megaopt_testing import require_partition, temporary_plugin

from megaopt_core import OptimizerEntry, build_optimizer, hookimpl
from megaopt_core.errors import OwnershipError, ShardingError
from megaopt_core.params import AxisPlacement, Granularity, MatrixView, ParamSpec, RankCoordinates
from megaopt_core.sharding import (
    Peers,
    Piece,
    PieceSpec,
    ReplicatedParams,
    ShardingStrategy,
    World,
)

pytestmark = pytest.mark.any_python

TP = AxisPlacement("tp", 2, dim=0)
DP = AxisPlacement("dp", 2, dim=0)


def spec_of(granularity: str = "tensor", shape: tuple[int, ...] = (8, 6), **more: Any) -> ParamSpec:
    """Return a parameter as pure data."""
    dtype = torch.float32
    return ParamSpec("w", shape, dtype, dtype, "muon", 0, Granularity(granularity), 1.0, **more)


@frozen
class Layout:
    """Pieces by a function of the rank."""

    of: Callable[[RankCoordinates], Sequence[PieceSpec]]

    def pieces(self, rank: RankCoordinates) -> Sequence[PieceSpec]:
        """Return what the function says."""
        return self.of(rank)


def check(spec: ParamSpec, of: Callable[[RankCoordinates], Sequence[PieceSpec]], **axes: int) -> None:
    """Raise unless the pieces are a partition that can be stepped."""
    require_partition("mine", Layout(of), [spec], World(axes))


def rows(spec: ParamSpec, ranks: int = 2, **more: Any) -> Callable[[RankCoordinates], list[PieceSpec]]:
    """Cut the first dimension over `dp`."""

    def of(rank: RankCoordinates) -> list[PieceSpec]:
        size, place = spec.shape[0] // ranks, rank.get("dp", 0)
        box = (place * size, *(0,) * (len(spec.shape) - 1)), (size, *spec.shape[1:])
        return [PieceSpec.of(spec.part(box), 0, **{key: make(place) for key, make in more.items()})]

    return of


def columns(spec: ParamSpec) -> Callable[[RankCoordinates], list[PieceSpec]]:
    """Cut the second dimension over `dp`."""
    return lambda rank: [PieceSpec.of(spec.part(((0, 3 * rank["dp"]), (8, 3))), 0)]


def slices(spec: ParamSpec) -> Callable[[RankCoordinates], list[PieceSpec]]:
    """Cut the elements in two over `dp`."""
    return lambda rank: [PieceSpec.of(spec.shard({}, 24 * rank["dp"], 24 * rank["dp"] + 24), 0)]


@pytest.mark.parametrize("granularity", ["tensor", "group"])
@pytest.mark.parametrize("cut", [rows, columns, slices])
def test_what_must_be_whole_is_not_cut(granularity, cut):
    """By rows, by columns and by ranges; an optimizer of elements takes all of them."""
    check(spec_of("element"), cut(spec_of("element")), dp=2)
    spec = spec_of(granularity)
    with pytest.raises(
        OwnershipError, match=r"'w', which is (cut into the box .* 'muon' steps whole|stepped in)"
    ):
        check(spec, cut(spec), dp=2)


def test_parts_that_data_parallelism_has_made_are_cuts_too():
    """A shard of a DTensor is no matrix; the whole of it with one owner is."""
    spec = spec_of(placements=(DP,))
    with pytest.raises(OwnershipError, match=r"Give the parameter one owner; or peers.*; or an exchange"):
        check(spec, lambda rank: [PieceSpec.of(spec.shard(rank), 0)], dp=2)
    check(spec, lambda rank: [PieceSpec.of(spec.part(((0, 0), (8, 6))), 0)] if rank["dp"] else [], dp=2)


def test_what_the_model_has_cut_is_stepped_as_it_is():
    """Tensor parallelism is the optimizer's business; a strategy's own cut inside a part is not."""
    spec = spec_of(placements=(TP,))
    check(spec, lambda rank: [PieceSpec.of(spec.shard(rank), 0)] if rank["dp"] else [], dp=2, tp=2)
    with pytest.raises(OwnershipError, match="steps whole tensors"):
        check(spec, lambda rank: rows(spec, 4)({"dp": 2 * rank.get("tp", 0) + rank["dp"]}), dp=2, tp=2)


def test_split_steps_and_peers_may_have_parts():
    """The layout says so; replicas of a part are no parts."""
    check(spec_of(splits=True), rows(spec_of()), dp=2)
    check(spec_of(splits=True), slices(spec_of()), dp=2)
    peers = {"peers": lambda place: Peers("dp", 2, place, dim=0)}
    check(spec_of(takes_peers=True), rows(spec_of(), **peers), dp=2)
    replicas = {"peers": lambda place: Peers("dp", 1, 0)}
    with pytest.raises(OwnershipError, match="steps whole tensors"):
        check(spec_of(takes_peers=True), rows(spec_of(), **replicas), dp=2)


def test_a_batch_is_cut_between_its_matrices():
    """Experts are matrices of their own; without the view, or inside of one, they are not."""
    stack = spec_of(shape=(4, 8, 6), view=MatrixView(batch_dims=1))
    check(stack, rows(stack), dp=2)
    with pytest.raises(OwnershipError, match="steps whole tensors"):
        check(stack, lambda rank: [PieceSpec.of(stack.part(((0, 4 * rank["dp"], 0), (4, 4, 6))), 0)], dp=2)
    plain = spec_of(shape=(4, 8, 6))
    with pytest.raises(OwnershipError, match="steps whole tensors"):
        check(plain, rows(plain), dp=2)


@pytest.mark.parametrize(
    ("granularity", "shape", "fits"),
    [
        ("element", (8, 6), True),
        ("element", (48,), True),
        ("element", (64,), True),
        ("element", (40,), False),
        ("element", (6, 8), False),
        ("element", (8, 6, 1), False),
        ("tensor", (8, 6), True),
        ("tensor", (48,), False),
        ("tensor", (6, 8), False),
    ],
)
def test_a_piece_has_the_shape_of_its_box(granularity, shape, fits):
    """Or is flat, padded or not, where an optimizer steps elements."""
    spec = spec_of(granularity)
    piece = PieceSpec(0, shape, ((0, spec.shard({})),))
    if fits:
        check(spec, lambda rank: [piece])
    else:
        with pytest.raises(OwnershipError, match=r"which is stepped in the shape .*; its box has"):
            check(spec, lambda rank: [piece])


def test_members_of_a_flat_piece_do_not_overlap():
    """Two ranges in one place would be one."""
    spec = spec_of("element")
    first, second = spec.shard({}, 0, 24), spec.shard({}, 24, 48)
    check(spec, lambda rank: [PieceSpec(0, (48,), ((0, first), (24, second)))])
    with pytest.raises(OwnershipError, match="is stepped in the shape"):
        check(spec, lambda rank: [PieceSpec(0, (48,), ((0, first), (16, second)))])


def test_a_group_that_is_stepped_at_once_is_on_one_rank():
    """One estimate of the learning rate for all of it needs all of it."""
    one, two = (
        spec_of("group"),
        ParamSpec("v", (4,), *[torch.float32] * 2, "prodigy", 0, Granularity.GROUP, 1.0),
    )
    pieces = [PieceSpec.of(spec.shard({}), 0) for spec in (one, two)]
    require_partition("mine", Layout(lambda rank: pieces if rank["dp"] else []), [one, two], World({"dp": 2}))
    with pytest.raises(OwnershipError, match="'v', which is apart from the rest of its group"):
        require_partition("mine", Layout(lambda rank: [pieces[rank["dp"]]]), [one, two], World({"dp": 2}))


class Whole(torch.optim.SGD):
    """An optimizer of whole tensors."""


class Halves(ShardingStrategy):
    """Cuts every tensor in two, both of which one process has; it attaches no exchange."""

    name = "halves"
    granularities = frozenset(Granularity)

    def layout(self, specs: Sequence[ParamSpec], world: World, options: Any) -> Layout:
        """Return two pieces a tensor."""
        return Layout(lambda rank: [p for spec in specs for at in (0, 1) for p in rows(spec)({"dp": at})])

    def attach(
        self, layout: Any, model: Any, pgs: Any, groups: Any, *, is_expert: bool = False
    ) -> ReplicatedParams:
        """Return views of the rows."""
        pieces = []
        for spec in layout.pieces(model.rank):
            ((_, shard),) = spec.members
            values = torch.nn.Parameter(model.values(shard).view(spec.shape))
            pieces.append(Piece(spec, values, (model.params[shard.name],)))
        return ReplicatedParams(pieces, None, model.chunks)


class Plugin:
    """The strategy, and optimizers with and without a split step."""

    megaopt_api = "1"

    @hookimpl
    def megaopt_sharding_strategies(self) -> dict[str, ShardingStrategy]:
        """Return the strategy."""
        return {"halves": Halves()}

    @hookimpl
    def megaopt_optimizer_entries(self) -> dict[str, OptimizerEntry]:
        """Return the optimizers."""
        kinds = {"elements": {"granularity": "element"}, "whole": {"granularity": "tensor"}}
        kinds["splitting"] = {"granularity": "tensor", "split_step": lambda inner: inner}
        return {name: OptimizerEntry(Whole, **fields) for name, fields in kinds.items()}


@pytest.mark.parametrize(
    ("optimizer", "said"),
    [
        ("whole", (ShardingError, "sharding='halves' attaches 'weight' without an exchange: it is cut")),
        ("splitting", (ShardingError, "sharding='halves' attaches 'weight' without an exchange: it is cut")),
        ("elements", None),
    ],
)
def test_a_cut_matrix_needs_an_exchange(optimizer, said):
    """Where nothing travels an optimizer makes an ordinary step, on half a matrix, even if it could split its step."""
    with temporary_plugin(Plugin()):
        build = lambda: build_optimizer(  # noqa: E731
            torch.nn.Linear(6, 8, bias=False), optimizer, lr=0.1, sharding="halves", overrides={}
        )
        if said is None:
            build()
        else:
            with pytest.raises(said[0], match=said[1]):
                build()
