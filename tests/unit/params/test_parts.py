"""The elements of a shard in what a rank holds, against indexing of the whole tensor."""

import pytest
import torch

from megaopt_core.errors import ShardingError
from megaopt_core.params.parts import shard_elements
from megaopt_core.params.specs import Shard

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
    assert torch.equal(shard_elements(first, shard, held), expected.reshape(-1)[1:7])


def test_a_shape_alone_tells_the_whole_or_the_box():
    """Anything else is an error that names the parameter, not a guess."""
    shard = Shard("w", (4, 3, 2), ((2, 0, 0), (1, 3, 2)), 0, 6)
    assert torch.equal(shard_elements(WHOLE, shard), WHOLE[2].reshape(-1))
    assert torch.equal(shard_elements(WHOLE[2:3], shard), WHOLE[2].reshape(-1))
    with pytest.raises(ShardingError, match=r"of 'w' is not in the model's tensor of shape \(3, 3, 2\)"):
        shard_elements(WHOLE[:3], shard)
    with pytest.raises(ShardingError, match=r"of 'w' is not in the model's tensor of shape \(2, 3, 2\)"):
        shard_elements(WHOLE[:2], shard, ((0, 0, 0), (2, 3, 2)))
