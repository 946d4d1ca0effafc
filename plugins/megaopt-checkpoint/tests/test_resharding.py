"""Whatever the layout, what is loaded is what was saved."""

import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from megaopt_checkpoint import load_checkpoint, save_checkpoint
from megaopt_checkpoint.values.chunks import chunks_of
from random_cuts import CutLayout, random_cuts
from training import logical_state, make, same, train, values

from megaopt_core.params import Shard

pytestmark = pytest.mark.any_python

FEW = settings(max_examples=8, suppress_health_check=list(HealthCheck))


@st.composite
def shards(draw: st.DrawFn) -> Shard:
    """Any range of any box of a tensor of up to four dimensions."""
    shape = tuple(draw(st.lists(st.integers(1, 5), max_size=4)))
    offsets = tuple(draw(st.integers(0, size - 1)) for size in shape)
    sizes = tuple(draw(st.integers(1, size - offset)) for size, offset in zip(shape, offsets, strict=True))
    ends = st.integers(0, math.prod(sizes))
    start, stop = sorted((draw(ends), draw(ends)))
    return Shard("w", shape, (offsets, sizes), start, stop)


@given(shards())
def test_boxes_are_the_range(shard):
    """Element by element, in order, and no more boxes than needed."""
    numbers = torch.arange(math.prod(shard.shape)).reshape(shard.shape)
    inside = numbers[tuple(slice(o, o + s) for o, s in zip(*shard.box, strict=True))].reshape(-1)
    chunks = chunks_of(shard)
    taken = [
        numbers[tuple(slice(o, o + s) for o, s in zip(chunk.offsets, chunk.sizes, strict=True))].reshape(-1)
        for chunk in chunks
    ]
    assert (
        torch.cat([torch.empty(0, dtype=torch.long), *taken]).tolist()
        == inside[shard.start : shard.stop].tolist()
    )
    assert [(chunk.start, chunk.stop) for chunk in chunks] == [
        (sum(map(len, taken[:index])), sum(map(len, taken[: index + 1]))) for index in range(len(taken))
    ]
    assert len(chunks) <= max(2 * len(shard.shape) - 1, 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@FEW
@given(first=st.integers(0, 10**6), second=st.integers(0, 10**6))
def test_one_flat_piece_to_another(tmp_path_factory, dtype, first, second):
    """Any order of parameters in one flat piece loads from any other, and training goes on with the same bits."""
    path = tmp_path_factory.mktemp("cuts") / "last"
    with random_cuts(*{first, second}):
        model, optimizer = make(sharding=f"cut{first}", dtype=dtype)
        train(model, optimizer, range(3))
        save_checkpoint(path, model, optimizer)
        other_model, other = make(seed=1, sharding=f"cut{second}", dtype=dtype)
        load_checkpoint(path, other_model, other)
        assert same(logical_state(optimizer), logical_state(other))
        assert same(values(model), values(other_model))
        train(model, optimizer, range(3, 5))
        train(other_model, other, range(3, 5))
        assert same(values(model), values(other_model))


@FEW
@given(seed=st.integers(0, 10**6), ranks=st.integers(2, 7))
def test_each_part_of_a_whole_checkpoint(tmp_path_factory, seed, ranks):
    """Each of several ranks loads its elements of a replicated checkpoint, and together they have all of them."""
    path = tmp_path_factory.mktemp("cuts") / "last"
    model, optimizer = make()
    train(model, optimizer, range(2))
    save_checkpoint(path, model, optimizer)
    expected = logical_state(optimizer)
    together = {key: torch.full_like(value, torch.nan) for key, value in expected.items()}
    for rank in range(ranks):
        with random_cuts(seed, ranks=ranks, rank=rank):
            other_model, other = make(seed=1, sharding=f"cut{seed}")
            load_checkpoint(path, other_model, other)
            for key, part in logical_state(other).items():
                here = ~part.isnan()
                assert together[key][here].isnan().all()
                together[key][here] = part[here]
            assert same(values(model), values(other_model))
    assert same(together, expected)


def test_layouts_are_cut_inside_parameters():
    """The strategy of these tests does what they need: several members, cut anywhere."""
    with random_cuts(3, ranks=3, rank=1):
        _, optimizer = make(sharding="cut3")
    members = [shard for part in optimizer.parts for piece in part.pieces for _, shard in piece.spec.members]
    assert any(not shard.is_whole for shard in members)
    assert len(members) > 2
    assert CutLayout((), 1, 0).pieces({}) == []
