"""Layouts of the distributed optimizer own every element once, whatever the model and the number of ranks."""

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from megaopt_distributed.buffers.buffer_layout import SHARD_ALIGNMENT, lay_out_buffers
from megaopt_distributed.strategy import Distributed

from megaopt_core.errors import ShardingError
from megaopt_core.params import Granularity, ParamSpec
from megaopt_core.sharding import LayoutOptions, ParamLayout, World

pytestmark = pytest.mark.any_python


def spec(
    name: str,
    shape: tuple[int, ...],
    *,
    group: int = 0,
    dtype: torch.dtype = torch.float32,
    is_expert: bool = False,
    shared_embedding: bool = False,
) -> ParamSpec:
    """Return a parameter as pure data."""
    return ParamSpec(
        name,
        shape,
        dtype,
        dtype,
        "adam",
        group,
        Granularity.ELEMENT,
        1.0,
        is_expert=is_expert,
        shared_embedding=shared_embedding,
    )


@st.composite
def models(draw: st.DrawFn) -> list[ParamSpec]:
    """Return some parameters of small, large, empty and prime sizes, in several groups and buffers."""
    count = draw(st.integers(0, 8))
    sizes = st.one_of(st.integers(0, 3), st.integers(1, 700), st.sampled_from([64, 128, 4096]))
    return [
        spec(
            f"p{index}",
            (draw(sizes),),
            group=draw(st.integers(0, 2)),
            dtype=draw(st.sampled_from([torch.float32, torch.bfloat16])),
            is_expert=draw(st.booleans()),
            shared_embedding=draw(st.booleans()),
        )
        for index in range(count)
    ]


WORLDS = st.builds(
    lambda dense, expert: World({"dp": dense, "expert_dp": expert}), st.integers(1, 9), st.integers(1, 5)
)
SIZES = st.one_of(st.none(), st.integers(1, 2000))


def layout_of(
    specs: Sequence[ParamSpec], world: World, bucket_size: int | None, *, in_buffers: bool, pad: bool = False
) -> ParamLayout:
    """Return a layout in buffers of the model's wrapper or in memory of its own."""
    options = LayoutOptions(bucket_size, pad)
    if in_buffers:
        options = LayoutOptions(bucket_size, pad, buffers=lay_out_buffers(specs, world, options))
    return Distributed().layout(specs, world, options)


@given(models(), WORLDS, SIZES, st.booleans())
@settings(max_examples=150)
def test_every_element_is_owned_once(specs, world, bucket_size, in_buffers):
    """Over all ranks, the pieces of a parameter are a partition of its elements."""
    layout = layout_of(specs, world, bucket_size, in_buffers=in_buffers)
    owned = {one.name: torch.zeros(one.numel, dtype=torch.int32) for one in specs}
    experts = {one.name for one in specs if one.is_expert}
    for dp_rank in range(world.size("dp")):
        for piece in layout.pieces({"dp": dp_rank}):
            for _, shard in piece.members:
                if shard.name not in experts:
                    owned[shard.name][shard.start : shard.stop] += 1
    for expert_rank in range(world.size("expert_dp")):
        for piece in layout.pieces({"expert_dp": expert_rank}):
            for _, shard in piece.members:
                if shard.name in experts:
                    owned[shard.name][shard.start : shard.stop] += 1
    assert all(bool((count == 1).all()) for count in owned.values())


@given(models(), WORLDS, SIZES, st.booleans())
@settings(max_examples=150)
def test_pieces_fit_their_rank_and_keep_alignment(specs, world, bucket_size, in_buffers):
    """A piece lies in its rank's shard, has no gaps, one group, and aligned cuts; an empty one is the first rank's."""
    layout = layout_of(specs, world, bucket_size, in_buffers=in_buffers)
    groups = {one.name: one.group for one in specs}
    sizes = {one.name: one.numel for one in specs}
    for rank in range(max(world.size("dp"), world.size("expert_dp"))):
        dense, expert = rank % world.size("dp"), rank % world.size("expert_dp")
        for piece in layout.pieces({"dp": dense, "expert_dp": expert}):
            key, start, stop = piece.buffer
            shards = layout.shards(key)
            mine = expert if key.is_expert else dense
            if start == stop:
                (each,) = piece.members
                bounds = {low for low, _ in layout.buffers({})[key].buckets}
                assert (mine, each[1].numel, sizes[each[1].name]) == (0, 0, 0)
                assert start in bounds
                assert {groups[each[1].name]} == {piece.group}
                continue
            inside = [
                low + mine * (high - low) // shards
                <= start
                < stop
                <= low + (mine + 1) * (high - low) // shards
                for low, high in layout.buffers({})[key].buckets
            ]
            assert inside.count(True) == 1
            assert {groups[shard.name] for _, shard in piece.members} == {piece.group}
            position = 0
            for offset, shard in piece.members:
                assert offset == position
                position += shard.numel
                assert shard.start % SHARD_ALIGNMENT == 0
                assert shard.stop % SHARD_ALIGNMENT == 0 or shard.stop == sizes[shard.name]
            assert piece.shape == (position,) == (stop - start,)
            assert len(piece.members) == 1 or in_buffers


@given(models(), WORLDS, SIZES)
@settings(max_examples=60)
def test_gathering_restores_every_parameter(specs, world, bucket_size):
    """What ranks write into their pieces is, put together in buffers, what the parameters hold."""
    layout = layout_of(specs, world, bucket_size, in_buffers=True)
    flat = {key: torch.full((buffer.numel,), -1.0) for key, buffer in layout.buffers({}).items()}
    values = {one.name: torch.arange(one.numel, dtype=torch.float32) for one in specs}
    for key, memory in flat.items():
        for rank in range(layout.shards(key)):
            for piece in layout.pieces({"expert_dp" if key.is_expert else "dp": rank}):
                where, start, _ = piece.buffer
                if where == key:
                    for offset, shard in piece.members:
                        begin = start + offset
                        memory[begin : begin + shard.numel] = values[shard.name][shard.start : shard.stop]
    for key, buffer in layout.buffers({}).items():
        for name, (start, stop) in buffer.param_ranges.items():
            assert torch.equal(flat[key][start:stop], values[name])


def test_neighbours_of_one_group_are_one_piece() -> None:
    """Aligned parameters are fused; one of an odd size ends its run, and so does another group."""
    specs = [spec("d", (64,), group=1), spec("c", (7,)), spec("b", (128,)), spec("a", (64, 2))]
    run, other = layout_of(specs, World(), None, in_buffers=True).pieces({})
    assert [shard.name for _, shard in run.members] == ["a", "b", "c"]
    assert run.shape == (128 + 128 + 7,)
    assert (other.group, other.shape) == (1, (64,))


def test_parameters_that_the_buffers_lack_are_named() -> None:
    """A layer that begins to train after wrapping has no place in the buffers."""
    specs = [spec("present", (4,)), spec("absent", (4,))]
    options = LayoutOptions(buffers=lay_out_buffers(specs[:1], World(), LayoutOptions()))
    with pytest.raises(ShardingError, match="absent"):
        Distributed().layout(specs, World(), options)
