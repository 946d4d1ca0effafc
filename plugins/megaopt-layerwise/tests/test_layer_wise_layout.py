"""Who owns what, as pure data: at any number of ranks, along every axis."""

import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from megaopt_layerwise.strategy import LayerWise
from megaopt_testing import require_partition

from megaopt_core.errors import ShardingError
from megaopt_core.params import MATRIX, AxisPlacement, Granularity, MatrixView, ParamSpec
from megaopt_core.sharding import (
    BufferKey,
    LayoutOptions,
    ParamLayout,
    PerBufferParamLayout,
    World,
)

pytestmark = pytest.mark.any_python

FP32 = torch.float32


def matrix(name: str, shape: tuple[int, ...], **more: Any) -> ParamSpec:
    """Return the spec of a matrix that costs what Newton-Schulz does."""
    cost = float(shape[-1] * shape[-2] * min(shape[-2:]))
    return ParamSpec(name, shape, FP32, FP32, "muon", 0, Granularity.TENSOR, cost, **{"view": MATRIX, **more})


def llama(layers: int, tp: int = 1) -> list[ParamSpec]:
    """Return the matrices of a large dense model, cut as tensor parallelism cuts them."""
    cuts = {
        "qkv": ((10240, 8192), 0),
        "out": ((8192, 8192), 1),
        "up": ((57344, 8192), 0),
        "down": ((8192, 28672), 1),
    }
    return [
        matrix(
            f"layers.{layer}.{name}", shape, placements=(AxisPlacement("tp", tp, dim=dim),) if tp > 1 else ()
        )
        for layer in range(layers)
        for name, (shape, dim) in cuts.items()
    ]


def layout_of(specs: Sequence[ParamSpec], world: World) -> ParamLayout:
    """Return the checked layout of a model that nothing wraps."""
    layout = LayerWise().layout(specs, world, LayoutOptions())
    require_partition("layer_wise", layout, specs, world)
    return layout


def owners_of(layout: ParamLayout, world: World, *axes: str) -> Counter[str]:
    """Return how many ranks own each matrix."""
    return Counter(
        shard.name
        for rank in world.ranks(*axes)
        for piece in layout.pieces(rank)
        for _, shard in piece.members
    )


def test_512_ranks_in_seconds():
    """Each matrix has one owner among all ranks that hold a part of it."""
    start = time.process_time()
    for tp in (1, 8):
        world = World({"dp": 512 // tp, "tp": tp})
        specs = llama(80, tp)
        layout = layout_of(specs, world)
        assert set(owners_of(layout, world, "dp", "tp").values()) == {1}
    assert time.process_time() - start < 10


def test_a_matrix_that_nothing_cuts_has_an_owner_at_each_tensor_parallel_place():
    """All ranks there hold copies, and no value travels between them."""
    world = World({"dp": 2, "tp": 2})
    layout = layout_of([matrix("router", (8, 64)), *llama(1, 2)], world)
    assert owners_of(layout, world, "dp", "tp")["router"] == 2


def test_cut_matrices_are_level_over_all_ranks_that_hold_parts():
    """Four equal matrices for two times two ranks: one each, and the whole of it."""
    world = World({"dp": 2, "tp": 2})
    specs = [matrix(f"{at}", (64, 32), placements=(AxisPlacement("tp", 2, dim=0),)) for at in range(4)]
    layout = layout_of(specs, world)
    for rank in world.ranks("dp", "tp"):
        (piece,) = layout.pieces(rank)
        assert piece.shape == (64, 32)


def test_experts_stay_with_the_ranks_that_have_them():
    """Expert parallelism tells matrices apart, by index or along their batch; their tensor parallelism cuts them."""
    world = World({"dp": 4, "ep": 2, "expert_dp": 2, "expert_tp": 2})
    batched = matrix(
        "batched",
        (8, 6, 4),
        is_expert=True,
        view=MatrixView(batch_dims=1),
        placements=(AxisPlacement("ep", 2, dim=0), AxisPlacement("expert_tp", 2, dim=1)),
    )
    single = matrix("single", (6, 4), is_expert=True, placements=(AxisPlacement("ep", 2, index=1),))
    specs = [matrix("dense", (16, 16)), batched, single]
    layout = layout_of(specs, world)
    pieces = {
        tuple(rank.values()): {piece.members[0][1].name: piece.shape for piece in layout.pieces(rank)}
        for rank in world.ranks("ep", "expert_dp", "expert_tp")
    }
    assert sum("batched" in found for found in pieces.values()) == 2
    assert {found["batched"] for found in pieces.values() if "batched" in found} == {(4, 6, 4)}
    assert all(ep == 1 for (ep, _, _), found in pieces.items() if "single" in found)


def experts_of(kind: str) -> list[ParamSpec]:
    """Return experts for four places: a batch that has two at each, or single ones, of which the first has one."""
    if kind == "batched":
        view, cut = MatrixView(batch_dims=1), (AxisPlacement("ep", 4, dim=0),)
        return [matrix("experts", (8, 32, 16), is_expert=True, view=view, placements=cut)]
    return [
        matrix(f"expert{ep}.{at}", (32, 16), is_expert=True, placements=(AxisPlacement("ep", 4, index=ep),))
        for ep in range(4)
        for at in range(2 if ep else 1)
    ]


@pytest.mark.parametrize("kind", ["batched", "one by one"])
def test_dense_matrices_level_what_experts_leave_unequal(kind):
    """Eight ranks, two of which share the experts of each place: none has more than a dense matrix above another."""
    world = World({"dp": 8, "ep": 4, "expert_dp": 2})
    specs = {
        spec.name: spec for spec in [*(matrix(f"{at}", (32, 16)) for at in range(12)), *experts_of(kind)]
    }
    layout = layout_of(list(specs.values()), world)
    costs = [
        sum(
            specs[shard.name].cost * shard.numel / specs[shard.name].numel
            for piece in layout.pieces({"dp": rank, "ep": rank % 4, "expert_dp": rank // 4})
            for _, shard in piece.members
        )
        for rank in range(8)
    ]
    assert max(costs) - min(costs) <= specs["0"].cost


def test_buffers_level_experts_over_dense_matrices():
    """A rank that knows its own experts alone gives them to the place whose ranks have less of dense matrices."""
    world = World({"dp": 4, "ep": 2, "expert_dp": 2})
    specs = [matrix("dense", (32, 32)), matrix("expert", (32, 32), is_expert=True)]
    shares = {
        key.is_expert: [end - begin for rank in range(ranks) for begin, end in [buffer.share(0, rank, ranks)]]
        for key, buffer in LayerWise().buffers(specs, world, LayoutOptions()).buffers.items()
        for ranks in [2 if key.is_expert else 4]
    }
    assert shares == {False: [1024, 0, 0, 0], True: [0, 1024]}


def test_a_rank_without_a_matrix_has_an_empty_share():
    """Two matrices for five ranks."""
    world = World({"dp": 5})
    layout = layout_of([matrix("a", (8, 8)), matrix("b", (4, 8))], world)
    assert [len(layout.pieces(rank)) for rank in world.ranks("dp")] == [1, 1, 0, 0, 0]
    (buffer,) = layout.buffers({}).values()
    assert buffer.share_ends == ((64, 128, 128, 128, 128),)


def test_buffers_that_cut_a_matrix_are_refused():
    """The error says how to wrap the model."""
    specs = [matrix("a", (8, 8)), matrix("b", (8, 8))]
    key, bucket_of = BufferKey(FP32, FP32), {"a": 0, "b": 0}
    buffers = {key: PerBufferParamLayout({"a": (0, 64), "b": (64, 128)}, (128,), bucket_of)}
    layout = LayerWise().layout(specs, World({"dp": 2}), LayoutOptions(buffers=buffers))
    pieces = [piece for place in range(2) for piece in layout.pieces({"dp": place})]
    assert [piece.members[0][1].name for piece in pieces] == ["a", "b"]
    shifted = {key: PerBufferParamLayout({"a": (32, 96), "b": (128, 192)}, (192,), bucket_of)}
    with pytest.raises(ShardingError, match=r"cut 1 of them over ranks: a\. Wrap it with full_param_layout="):
        LayerWise().layout(specs, World({"dp": 3}), LayoutOptions(buffers=shifted))
    with pytest.raises(
        ShardingError, match=r"^1 trainable parameters are not in the buffers .*: c; wrap the"
    ):
        LayerWise().layout([matrix("c", (2, 2))], World({"dp": 2}), LayoutOptions(buffers=buffers))


def test_what_cannot_have_one_owner_is_refused():
    """Matrices that are cut along two axes at once, and those that data parallelism has cut."""
    param = torch.nn.Parameter(torch.zeros(4, 4))
    twice = matrix("w", (8, 8), placements=(AxisPlacement("tp", 2, dim=0), AxisPlacement("ep", 2, dim=1)))
    assert LayerWise().refuse(param, twice) == "its matrices are cut along 2 axes at once: tp, ep"
    by_data = matrix("w", (8, 8), placements=(AxisPlacement("dp", 2, dim=0),))
    assert LayerWise().refuse(param, by_data) == "it is sharded over the data-parallel ranks already"
    assert LayerWise().refuse(param, matrix("w", (4, 4))) is None


def test_bucketed_buffers_keep_matrices_whole_and_shares_level():
    """Shares are as long as what they hold; a shared embedding has a bucket of its own."""
    specs = [matrix(f"{at}", (32, 32)) for at in range(8)] + [matrix("tied", (32, 32), shared_embedding=True)]
    full = LayerWise().buffers(specs, World({"dp": 2}), LayoutOptions(bucket_size=4096))
    (buffer,) = full.buffers.values()
    assert [sum(at == bucket for at in buffer.bucket_of.values()) for bucket in range(3)] == [1, 4, 4]
    loads = Counter()
    for name, (begin, end) in buffer.param_ranges.items():
        (place,) = [
            rank
            for rank in range(2)
            for low, high in [buffer.share(buffer.bucket_of[name], rank, 2)]
            if low <= begin and end <= high
        ]
        loads[place] += end - begin
    assert abs(loads[0] - loads[1]) <= 1024
