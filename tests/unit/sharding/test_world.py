"""Placements over axes say what each rank has, and worlds who there is."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megaopt_core.errors import ShardingError
from megaopt_core.params import AxisPlacement, Granularity, ParamSpec
from megaopt_core.sharding import Peers, PieceSpec, World, _stage_specs
from megaopt_core.sharding._stage_specs import _Held, _joined, _merged

pytestmark = pytest.mark.any_python


def spec_of(name: str = "w", shape: tuple[int, ...] = (8, 4), **more: Any) -> ParamSpec:
    """Return a parameter as pure data."""
    dtype = torch.float32
    return ParamSpec(name, shape, dtype, dtype, "adam", 0, Granularity.ELEMENT, 1.0, **more)


@st.composite
def placements(draw: st.DrawFn, dims: int) -> tuple[AxisPlacement, ...]:
    """Up to three axes, some of which cut."""
    names = draw(st.permutations(["tp", "dp", "ep"]))[: draw(st.integers(0, 3))]
    return tuple(
        AxisPlacement(name, draw(st.integers(1, 4)), dim=draw(st.one_of(st.none(), st.integers(0, dims - 1))))
        for name in names
    )


@given(st.data())
def test_parts_are_those_that_torch_chunk_cuts(data):
    """Axis after axis; uneven and empty ones too."""
    shape = tuple(data.draw(st.lists(st.integers(1, 7), min_size=1, max_size=3)))
    cuts = data.draw(placements(len(shape)))
    spec = spec_of(shape=shape, placements=cuts)
    numbers = torch.arange(spec.numel).view(shape)
    rank = {cut.axis: data.draw(st.integers(0, cut.size - 1)) for cut in cuts}
    expected = numbers
    for cut in cuts:
        if cut.dim is not None:
            chunks = expected.chunk(cut.size, dim=cut.dim)
            at = rank[cut.axis]
            expected = chunks[at] if at < len(chunks) else expected.narrow(cut.dim, 0, 0)
    offsets, sizes = spec.box(rank)
    assert sizes == tuple(expected.shape)
    inside = numbers[tuple(slice(at, at + size) for at, size in zip(offsets, sizes, strict=True))]
    assert torch.equal(inside, expected)
    assert spec.shard(rank).numel == expected.numel()


def test_only_one_place_of_an_axis_may_have_a_tensor():
    """An expert of one expert-parallel rank is empty elsewhere."""
    spec = spec_of(placements=(AxisPlacement("ep", 4, index=2),))
    assert [spec.shard({"ep": place}).numel for place in range(4)] == [0, 0, 32, 0]
    assert spec.dividing == spec.placements
    assert spec_of(placements=(AxisPlacement("tp", 1, dim=0), AxisPlacement("dp", 4))).dividing == ()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: AxisPlacement("tp", 0), "at least 1 rank"),
        (lambda: AxisPlacement("tp", 2, dim=0, index=0), "dim or index, not both"),
        (lambda: AxisPlacement("ep", 2, index=2), "no rank has index 2"),
        (
            lambda: spec_of(placements=(AxisPlacement("tp", 2, dim=0),)).box({"tp": 2}),
            "has 2 ranks, none at 2",
        ),
        (lambda: World({"dp": 0}), "axis 'dp' has 0 ranks"),
        (lambda: Peers("dp", 2, index=2), "place 2 is outside a block of 2"),
    ],
)
def test_what_cannot_be_is_named(make, message):
    """Errors are of our own class."""
    with pytest.raises(ShardingError, match=message):
        make()


def test_a_piece_takes_the_shape_of_its_box():
    """A range inside a box is flat."""
    spec = spec_of()
    assert PieceSpec.of(spec.part(((2, 0), (3, 4))), 5) == PieceSpec(
        5, (3, 4), ((0, spec.part(((2, 0), (3, 4)))),)
    )
    assert PieceSpec.of(spec.shard({}, 3, 9), 0).shape == (6,)


def test_a_stage_has_the_parameters_of_all_its_ranks():
    """What only some ranks have gets the place where it is; what all have stays as it is."""
    world = World({"ep": 2, "dp": 2})
    dense, first, second = spec_of("dense"), spec_of("expert0"), spec_of("expert1")
    axes = ("tp", "expert_tp", "ep", "dp", "expert_dp", "dp_replicate", "expert_dp_replicate")

    def ranks(ep):
        return tuple(tuple((axis, {"ep": ep, "dp": dp}.get(axis, 0)) for axis in axes) for dp in range(2))

    merged = _merged([_Held(ranks(1), (dense, second)), _Held(ranks(0), (dense, first))], world)
    assert [spec.name for spec in merged] == ["dense", "expert0", "expert1"]
    assert [spec.placements for spec in merged] == [
        (),
        (AxisPlacement("ep", 2, index=0),),
        (AxisPlacement("ep", 2, index=1),),
    ]


def test_ranks_ask_for_unknown_parameters_together(monkeypatch):
    """A rank that knows what all others have answers the one that does not, or that one waits for ever."""
    first, second = (_Held(((("ep", at),),), (spec_of(f"expert{at}"),), bytes([at])) for at in range(2))
    everyone, calls = [[first, second], [first]], []

    def gather(value, _group, _what):
        calls.append(value)
        if len(calls) % 2:
            return [[(entry.ranks, entry.digest) for entry in held] for held in everyone]
        return [{entry.digest: entry.specs for entry in held} for held in everyone]

    monkeypatch.setattr(_stage_specs, "gather_objects", gather)
    monkeypatch.setattr(_stage_specs, "communicates", lambda _group: True)
    assert [_joined(held, None) for held in everyone] == [[first, second]] * 2
    assert len(calls) == 4
