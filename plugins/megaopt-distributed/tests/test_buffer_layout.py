"""Buffers are laid out as their documentation says."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from megaopt_distributed.buffers.buffer_layout import (
    PARAM_ALIGNMENT,
    SHARD_ALIGNMENT,
    BufferRules,
    default_bucket_size,
    lay_out_buffer,
    lay_out_buffers,
)

from megaopt_core.params import Granularity, ParamSpec
from megaopt_core.sharding import BufferKey, LayoutOptions, World

pytestmark = pytest.mark.any_python


def spec(name: str, numel: int, **more: Any) -> ParamSpec:
    """Return a flat fp32 parameter as pure data."""
    dtype = torch.float32
    return ParamSpec(name, (numel,), dtype, dtype, "", 0, Granularity.TENSOR, 0.0, **more)


@given(
    st.lists(st.tuples(st.integers(0, 5000), st.booleans()), max_size=12),
    st.integers(1, 40),
    st.one_of(st.none(), st.integers(1, 9000)),
    st.booleans(),
)
@settings(max_examples=200)
def test_sharded_buffers_keep_their_alignment(params, shards, bucket_size, pad) -> None:
    """Starts, bucket ends and every rank's part are aligned; nothing overlaps; order is reversed."""
    specs = [spec(f"p{index}", numel, shared_embedding=alone) for index, (numel, alone) in enumerate(params)]
    buffer = lay_out_buffer(specs, BufferRules.sharded(shards, LayoutOptions(bucket_size, pad)))
    assert list(buffer.param_ranges) == [one.name for one in reversed(specs)]
    for low, high in buffer.buckets:
        assert high % math.lcm(shards, 128) == 0
        assert not pad or high % 2**16 == 0
        assert (high - low) // shards % SHARD_ALIGNMENT == 0
    end = 0
    for one in reversed(specs):
        start, stop = buffer.param_ranges[one.name]
        low, high = buffer.buckets[buffer.bucket_of[one.name]]
        assert start % PARAM_ALIGNMENT == 0
        assert end <= start
        assert (low <= start and stop <= high) or start == stop
        assert stop - start == one.numel
        end = stop
        if one.shared_embedding and one.numel:
            others = [
                name for name, bucket in buffer.bucket_of.items() if bucket == buffer.bucket_of[one.name]
            ]
            assert [
                name for name in others if buffer.param_ranges[name][0] != buffer.param_ranges[name][1]
            ] == [one.name]


def test_buffers_that_are_not_sharded_have_no_padding() -> None:
    """Without a distributed optimizer parameters lie close together."""
    buffer = lay_out_buffer([spec("a", 3), spec("b", 7), spec("c", 5)], BufferRules(bucket_size=8))
    assert buffer.param_ranges == {"c": (0, 5), "b": (5, 12), "a": (12, 15)}
    assert buffer.bucket_ends == (12, 15)


def test_there_is_one_buffer_a_kind() -> None:
    """Dtypes, experts and chunks do not share a buffer."""
    bf16 = ParamSpec("h", (4,), torch.bfloat16, torch.float32, "", 0, Granularity.TENSOR, 0.0)
    specs = [spec("a", 4), bf16, spec("e", 4, is_expert=True), spec("other", 4)]
    buffers = lay_out_buffers(specs, World({"dp": 2}), LayoutOptions(chunk_of={"other": 1}))
    fp32 = torch.float32
    assert list(buffers) == [
        BufferKey(fp32, fp32),
        BufferKey(torch.bfloat16, fp32),
        BufferKey(fp32, fp32, is_expert=True),
        BufferKey(fp32, fp32, chunk=1),
    ]


def test_the_default_bucket_grows_with_the_ranks() -> None:
    """`max(40_000_000, 1_000_000 * dp)` elements."""
    assert [default_bucket_size(ranks) for ranks in (1, 40, 41, 512)] == [
        40_000_000,
        40_000_000,
        41_000_000,
        512_000_000,
    ]
