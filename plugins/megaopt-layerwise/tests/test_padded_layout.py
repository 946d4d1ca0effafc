"""Layouts with equal shards: no parameter crosses one, buckets keep the order of the backward pass, all is aligned."""

import itertools
import math
from collections.abc import Iterable, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from megaopt_distributed import DistributedDataParallelConfig
from megaopt_layerwise.padded_layout import (
    compute_full_param_layout,
    compute_per_buffer_param_layout,
    shard_divisor,
)

from megaopt_core.errors import ShardingError
from megaopt_core.sharding import BufferKey, PerBufferParamLayout

pytestmark = pytest.mark.any_python

PLAIN = DistributedDataParallelConfig()
PADDED = DistributedDataParallelConfig(pad_buckets_for_high_nccl_busbw=True)


def parameters(*sizes: int, embeddings: Iterable[int] = ()) -> list[torch.nn.Parameter]:
    """Return flat parameters on the meta device; those at some positions are shared embeddings."""
    params = [torch.nn.Parameter(torch.empty(size, device="meta")) for size in sizes]
    for position in embeddings:
        params[position].shared_embedding = True
    return params


@pytest.mark.parametrize(
    ("ranks", "plain", "padded"),
    [(1, 128, 65536), (2, 64, 32768), (3, 128, 65536), (8, 64, 8192), (512, 64, 128)],
)
def test_the_divisor_of_shards(ranks, plain, padded):
    """lcm(64, bucket_divisor // dp), the divisor of buckets being lcm(dp, 128), or lcm(dp, 128, 2**16)."""
    assert shard_divisor(ranks, PLAIN) == plain == math.lcm(64, math.lcm(ranks, 128) // ranks)
    assert shard_divisor(ranks, PADDED) == padded == math.lcm(64, math.lcm(ranks, 128, 2**16) // ranks)


def test_the_largest_goes_first_onto_the_emptiest_shard():
    """Written out: 5 parameters on 2 shards, the last of the model first."""
    layout = compute_per_buffer_param_layout(parameters(256, 128, 64, 192, 320), None, 2, PLAIN)
    # 320 -> shard 0, 256 -> shard 1, 192 -> shard 1 (448), 128 -> shard 0 (448), 64 -> shard 0 (512)
    assert layout.param_ranges == {
        "4": (0, 320),
        "1": (320, 448),
        "2": (448, 512),
        "0": (512, 768),
        "3": (768, 960),
    }
    assert layout.bucket_ends == (1024,)
    assert layout.share_ends == ()


def test_buckets_are_closed_at_their_size():
    """The last parameters of the model are in the first bucket."""
    layout = compute_per_buffer_param_layout(parameters(64, 64, 64, 64, 64), 128, 1, PLAIN)
    assert layout.bucket_of == {"4": 0, "3": 0, "2": 1, "1": 1, "0": 2}
    assert layout.bucket_ends == (128, 256, 384)


def test_a_tied_embedding_stands_alone():
    """It ends the bucket before it, and nothing joins it."""
    layout = compute_per_buffer_param_layout(parameters(64, 64, 640, 64, embeddings=[2]), None, 2, PLAIN)
    assert layout.bucket_of == {"3": 0, "2": 1, "1": 2, "0": 2}
    assert [stop - start for start, stop in layout.buckets] == [128, 1280, 128]


def test_names_are_positions_indices_or_given():
    """As a wrapped model needs them."""
    params = parameters(64, 64)
    assert list(compute_per_buffer_param_layout(params, None, 2, PLAIN).param_ranges) == ["1", "0"]
    assert list(compute_per_buffer_param_layout(params, None, 2, PLAIN, [7, 9]).param_ranges) == ["9", "7"]
    named = compute_per_buffer_param_layout(params, None, 2, PLAIN, names=["a", "b"])
    assert list(named.param_ranges) == ["b", "a"]
    with pytest.raises(
        ShardingError, match=r"^a layout of 2 parameters needs as many different names, got 1$"
    ):
        compute_per_buffer_param_layout(params, None, 2, PLAIN, names=["a", "a"])
    with pytest.raises(ShardingError, match=r"^data_parallel_world_size=0: there is at least 1 rank$"):
        compute_per_buffer_param_layout(params, None, 0, PLAIN)


def test_nothing_to_lay_out_is_an_empty_layout():
    """A group of buffers may be empty on a rank."""
    assert compute_per_buffer_param_layout([], 100, 4, PLAIN).numel == 0
    assert compute_full_param_layout([], None, 4, PLAIN).buffers == {}


def test_every_kind_of_parameter_has_a_buffer_of_its_own():
    """Experts share theirs among other ranks; names stay positions in the model."""
    full, brain = torch.float32, torch.bfloat16
    kinds = ((8, 8), full), ((8,), full), ((8, 8), full), ((8, 8), brain)
    dense, bias, expert, half = (
        torch.nn.Parameter(torch.empty(shape, dtype=dtype, device="meta")) for shape, dtype in kinds
    )
    expert.allreduce = False
    config = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
    layout = compute_full_param_layout([dense, bias, expert, half], None, 4, config, 2)
    assert {key: (list(buffer.param_ranges), buffer.numel) for key, buffer in layout.buffers.items()} == {
        BufferKey(full, full, is_managed_by_layer_wise=True): (["0"], 256),
        BufferKey(full, full): (["1"], 256),
        BufferKey(full, full, is_expert=True, is_managed_by_layer_wise=True): (["2"], 128),
        BufferKey(brain, full, is_managed_by_layer_wise=True): (["3"], 256),
    }
    assert compute_full_param_layout([expert], None, 4, config).buffers.popitem()[1].numel == 256


@given(
    sizes=st.lists(
        st.one_of(st.integers(0, 5), st.integers(1, 900), st.sampled_from([64, 128, 4096])), max_size=20
    ),
    ranks=st.integers(1, 9),
    bucket_size=st.none() | st.integers(1, 3000),
    config=st.sampled_from([PLAIN, PADDED]),
    data=st.data(),
)
@settings(max_examples=150)
def test_any_model_on_any_number_of_ranks(sizes, ranks, bucket_size, config, data):
    """What the layout promises."""
    embeddings = data.draw(st.sets(st.integers(0, max(len(sizes) - 1, 0)), max_size=2))
    embeddings = {position for position in embeddings if position < len(sizes)}
    layout = compute_per_buffer_param_layout(
        parameters(*sizes, embeddings=embeddings), bucket_size, ranks, config
    )
    assert set(layout.param_ranges) == {str(position) for position in range(len(sizes))}
    _require_whole_in_shards(layout, sizes, ranks)
    # Buckets are runs of the backward pass, closed once they are full.
    order = [layout.bucket_of[str(position)] for position in reversed(range(len(sizes)))]
    assert order == sorted(order)
    for bucket, (start, stop) in enumerate(layout.buckets):
        inside = [position for position in range(len(sizes)) if layout.bucket_of[str(position)] == bucket]
        assert (stop - start) % (ranks * shard_divisor(ranks, config)) == 0
        assert len(inside) == 1 or not embeddings.intersection(inside)
        if bucket_size is not None:
            assert sum(sizes[position] for position in inside[1:]) < bucket_size


def _require_whole_in_shards(layout: PerBufferParamLayout, sizes: Sequence[int], ranks: int) -> None:
    taken = []
    for position, size in enumerate(sizes):
        start, stop = layout.param_ranges[str(position)]
        assert stop - start == size
        assert start % 64 == 0
        bucket = layout.bucket_of[str(position)]
        shares = [layout.share(bucket, rank, ranks) for rank in range(ranks)]
        assert len({high - low for low, high in shares}) == 1
        assert sum(low <= start and stop <= high and start < high for low, high in shares) == 1 or not size
        taken += [(start, stop)] if size else []
    taken.sort()
    assert all(stop <= start for (_, stop), (start, _) in itertools.pairwise(taken))
