"""The elements of a shard in what a rank holds, against indexing of the whole tensor."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megaopt_core.errors import ShardingError
from megaopt_core.params import Box, Shard
from megaopt_core.sharding._elements import elements_of, store_elements

pytestmark = pytest.mark.any_python

WHOLE = torch.arange(24.0).view(4, 3, 2)


@pytest.mark.parametrize(
    "held",
    [((0, 0, 0), (4, 3, 2)), ((2, 0, 0), (2, 3, 2)), ((1, 1, 0), (3, 2, 2))],
    ids=["the whole", "the box itself", "a part that is larger"],
)
def test_the_box_is_found_in_what_is_held(held):
    """Whatever part of the logical tensor a rank's model has, the rows are those of the box."""
    offsets, sizes = ((2, 1, 0), (2, 2, 2)) if held[1] == (3, 2, 2) else ((2, 0, 0), (2, 3, 2))
    first = WHOLE
    for dim, (at, size) in enumerate(zip(*held, strict=True)):
        first = first.narrow(dim, at, size)
    expected = WHOLE[tuple(slice(at, at + size) for at, size in zip(offsets, sizes, strict=True))]
    shard = Shard("w", (4, 3, 2), (offsets, sizes), 1, 7)
    assert torch.equal(elements_of(first, held, shard), expected.reshape(-1)[1:7])


def test_what_is_not_held_is_an_error_that_names_the_parameter():
    """Anything else would be other elements, silently."""
    shard = Shard("w", (4, 3, 2), ((2, 0, 0), (1, 3, 2)), 0, 6)
    with pytest.raises(ShardingError, match=r"'w': this rank holds the box .* does not contain the box"):
        elements_of(WHOLE[:2], ((0, 0, 0), (2, 3, 2)), shard)


@given(st.data())
def test_storing_is_the_inverse_of_reading(data):
    """Of any range of any box inside any part, strided or not; nothing else is changed."""
    shape = tuple(data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    held = data.draw(boxes(((0,) * len(shape), shape)))
    box = data.draw(boxes(held))
    numel = torch.Size(box[1]).numel()
    start, stop = sorted(data.draw(st.tuples(st.integers(0, numel), st.integers(0, numel))))
    shard = Shard("w", shape, box, start, stop)
    local = torch.arange(float(torch.Size(held[1]).numel())).view(held[1])
    if data.draw(st.booleans()):
        local = local.t().contiguous().t() if local.dim() == 2 else local
    before = local.clone()
    store_elements(local, held, shard, -1.0 - torch.arange(float(shard.numel)))
    assert elements_of(local, held, shard).tolist() == [-1.0 - index for index in range(shard.numel)]
    assert int((local != before).sum()) == shard.numel


@st.composite
def boxes(draw: st.DrawFn, outer: Box) -> Box:
    """A box inside another."""
    offsets = tuple(at + draw(st.integers(0, size - 1)) for at, size in zip(*outer, strict=True))
    sizes = tuple(
        draw(st.integers(1, outer[0][dim] + outer[1][dim] - offset)) for dim, offset in enumerate(offsets)
    )
    return offsets, sizes
