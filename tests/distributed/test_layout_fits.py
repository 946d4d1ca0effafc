"""Layouts and process groups that do not fit each other are refused before anything is stepped."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from attrs import evolve, field, frozen
from hypothesis import given, settings
from hypothesis import strategies as st
from megaopt_distributed import DistributedDataParallel, DistributedDataParallelConfig, plan_full_param_layout
from megaopt_distributed.buffers.buffer_layout import lay_out_buffers
from megaopt_distributed.ddp.fitting import require_fitting
from megaopt_testing import require_partition
from torch import nn

from megaopt_core import ProcessGroupCollection, build_optimizer, get_registry
from megaopt_core.errors import OwnershipError, ParallelGroupError, ShardingError
from megaopt_core.params import AxisPlacement, Granularity, ParamSpec, RankCoordinates, Shard
from megaopt_core.sharding import FullParamLayout, LayoutOptions, Peers, PieceSpec, World
from megaopt_core.sharding._ownership import owners_of
from megaopt_core.sharding._replicated import ReplicatedLayout

pytestmark = pytest.mark.any_python

needs_distributed = pytest.mark.skipif(
    "distributed" not in get_registry().strategies() or "adam" not in get_registry().optimizers(),
    reason="needs the distributed optimizer and one to step",
)
CONFIG = DistributedDataParallelConfig
SHARDED = CONFIG(use_distributed_optimizer=True)


# Layouts that are given.


def group_of(size: int) -> SimpleNamespace:
    """Stand for a process group."""
    return SimpleNamespace(size=lambda: size, rank=lambda: 0)


def groups_of(size: int) -> ProcessGroupCollection:
    """Return process groups of a size, for what only asks for it."""
    group = group_of(size)
    return ProcessGroupCollection(dp=group, dp_cp=group, expt_dp=group)


def fits(
    layout: FullParamLayout, module: nn.Module, config: DistributedDataParallelConfig, ranks: int = 1
) -> None:
    """Raise unless a layout fits."""
    require_fitting(layout, dict(module.named_parameters()), config, groups_of(ranks))


@settings(max_examples=60)
@given(
    st.lists(st.integers(0, 300), min_size=1, max_size=6),
    st.integers(1, 9),
    st.one_of(st.none(), st.integers(1, 500)),
    st.booleans(),
)
def test_every_planned_layout_fits(sizes, ranks, bucket_size, sharded):
    """Whatever the sizes, empty ones too, the number of ranks and the size of buckets."""
    module = nn.ParameterList([nn.Parameter(torch.zeros(size)) for size in sizes])
    config = CONFIG(
        use_distributed_optimizer=sharded,
        overlap_grad_reduce=bucket_size is not None,
        bucket_size=bucket_size,
    )
    fits(plan_full_param_layout(module, config, groups_of(ranks)), module, config, ranks)


def test_a_layout_that_is_not_for_shards_is_refused_by_a_sharded_wrapper():
    """Its buckets are not padded, or its parameters begin where a kernel may not be cut."""
    for module, reason in ((nn.Linear(5, 3), "share out"), (nn.Linear(8, 25, bias=False), "share out")):
        with pytest.raises(ShardingError, match=reason):
            fits(plan_full_param_layout(module, CONFIG()), module, SHARDED, 2)
    odd = nn.Sequential(nn.Linear(1, 3, bias=False), nn.Linear(1, 13, bias=False))
    with pytest.raises(ShardingError, match=r"'0.weight' at 13, no multiple of 8"):
        fits(plan_full_param_layout(odd, CONFIG()), odd, SHARDED)


def test_a_layout_for_another_number_of_ranks_is_refused():
    """Three ranks cannot share 128 elements out; two can take a layout that four could."""
    module = nn.Linear(8, 8)
    with pytest.raises(ShardingError, match=r"bucket \[0, 128\), which 3 ranks cannot"):
        fits(plan_full_param_layout(module, SHARDED, groups_of(2)), module, SHARDED, 3)
    fits(plan_full_param_layout(module, SHARDED, groups_of(4)), module, SHARDED, 2)


@pytest.mark.parametrize("sharded", [False, True])
def test_a_layout_with_gradients_of_another_dtype_is_refused(sharded):
    """fp32 gradients are asked for, the layout keeps those of bf16 parameters in bf16."""
    module = nn.Linear(2, 2).bfloat16()
    planned = CONFIG(use_distributed_optimizer=sharded)
    config = CONFIG(use_distributed_optimizer=sharded, grad_reduce_in_fp32=True)
    layout = plan_full_param_layout(module, planned)
    with pytest.raises(ShardingError, match=r"grad_dtype=torch.bfloat16; it needs grad_dtype=torch.float32"):
        DistributedDataParallel(module, config, full_param_layout=layout)


def test_a_layout_for_parameters_of_another_kind_is_refused():
    """Another dtype; dense parameters that have become those of an expert."""
    module = nn.Linear(2, 2)
    layout = plan_full_param_layout(module, SHARDED)
    with pytest.raises(
        ShardingError, match=r"param_dtype=torch.float32; it needs param_dtype=torch.bfloat16"
    ):
        fits(layout, nn.Linear(2, 2, dtype=torch.bfloat16), SHARDED)
    module.weight.allreduce = False
    with pytest.raises(
        ShardingError, match="'weight' in a buffer with is_expert=False; it needs is_expert=True"
    ):
        fits(layout, module, SHARDED)


def test_a_parameter_outside_of_its_bucket_is_refused():
    """In a bucket that does not exist, across the end of one, or in the one next to it."""
    module = nn.Sequential(nn.Linear(8, 16, bias=False), nn.Linear(8, 16, bias=False))
    config = CONFIG(use_distributed_optimizer=True, overlap_grad_reduce=True, bucket_size=128)
    layout = plan_full_param_layout(module, config)
    ((key, buffer),) = layout.buffers.items()
    assert buffer.bucket_ends == (128, 256)
    fits(layout, module, config)
    for change in (
        {"bucket_of": {"1.weight": 0, "0.weight": 0}},
        {"bucket_of": {"1.weight": 0, "0.weight": 2}},
        {"bucket_of": {"1.weight": 0}},
        {"bucket_ends": (256,)},
        {"param_ranges": {"1.weight": (64, 192), "0.weight": (0, 128)}},
    ):
        broken = FullParamLayout({key: evolve(buffer, **change)})
        with pytest.raises(ShardingError, match="no room"):
            fits(broken, module, config)


# Pieces of all ranks.


def spec_of(
    name: str, shape: tuple[int, ...] = (8,), *, group: int = 0, is_expert: bool = False, **more: Any
) -> ParamSpec:
    """Return a parameter as pure data."""
    dtype = torch.float32
    kind = Granularity.ELEMENT
    return ParamSpec(name, shape, dtype, dtype, "adam", group, kind, 1.0, is_expert=is_expert, **more)


def world_of(ranks: int, experts: int = 1) -> World:
    """Return a world of data-parallel ranks."""
    return World({"dp": ranks, "expert_dp": experts})


@frozen
class Given:
    """A layout whose pieces are written down, rank by rank."""

    dense: list
    expert: list = field(factory=lambda: [()])

    def pieces(self, rank: RankCoordinates) -> list[PieceSpec]:
        """Return what a rank owns, one piece a shard."""
        shards = [*self.dense[rank.get("dp", 0)], *self.expert[rank.get("expert_dp", 0)]]
        return [PieceSpec(0, (shard.numel,), ((0, shard),)) for shard in shards]


A = spec_of("a")
WRONG = {
    "two ranks": ([[A.shard({})], [A.shard({}, 0, 3)]], r"more than one rank owns elements \[0, 3\) of 'a'"),
    "no rank at the end": (
        [[A.shard({}, 0, 4)], [A.shard({}, 4, 7)]],
        r"no rank owns elements \[7, 8\) of 'a'",
    ),
    "no rank inside": ([[A.shard({}, 5)], [A.shard({}, 0, 2)]], r"no rank owns elements \[2, 5\) of 'a'"),
    "no rank at all": ([[], []], "no rank owns 8 of the 8 elements of 'a'"),
    "a stranger": ([[A.shard({})], [spec_of("b").shard({})]], "'b', which was not given to it"),
}


@pytest.mark.parametrize("case", WRONG)
def test_elements_without_one_owner_are_named(case):
    """By parameter and range."""
    dense, message = WRONG[case]
    with pytest.raises(OwnershipError, match=message) as caught:
        require_partition("wrong", Given(dense), [A], world_of(len(dense)))
    assert caught.value.names == (("b",) if case == "a stranger" else ("a",))


SUMS = {
    "two ranks": "they step 11 elements of 'a', which has 8",
    "no rank at the end": "they step 7 elements of 'a', which has 8",
    "no rank inside": "they step 5 elements of 'a', which has 8",
    "no rank at all": "they step 0 elements of 'a', which has 8",
}


@pytest.mark.parametrize("case", SUMS)
def test_the_build_counts_the_elements_that_ranks_step(case):
    """It names the parameter and both numbers."""
    dense, _ = WRONG[case]
    with pytest.raises(OwnershipError, match=SUMS[case]) as caught:
        owners_of("wrong", Given(dense), [A], world_of(len(dense)))
    assert caught.value.names == ("a",)


def test_copies_and_replicas_count_once_and_parts_each():
    """Along an axis that cuts nothing, in a block of peers, and along an axis that cuts."""
    whole = [[A.shard({})]]
    rows = AxisPlacement("tp", 2, dim=0)
    cut, world = spec_of("a", placements=(rows,)), World({"dp": 2, "tp": 2})
    replicas = lambda rank: [PieceSpec.of(A.shard({}), 0, peers=Peers("dp", 2, rank["dp"]))]  # noqa: E731
    parts = lambda rank: [PieceSpec.of(cut.shard(rank), 0)] if rank["dp"] else []  # noqa: E731
    (owners,) = owners_of("copies", Given([*whole, []]), [A], world)
    assert len(owners.by_name["a"]) == 1
    (owners,) = owners_of("replicas", SimpleNamespace(pieces=replicas), [A], world)
    assert len(owners.by_name["a"]) == 2
    (owners,) = owners_of("parts", SimpleNamespace(pieces=parts), [cut], world)
    assert [shard.box for _, shard, _ in owners.by_name["a"]] == [((0,), (4,)), ((4,), (4,))]
    some = lambda rank: [] if rank.get("tp") else parts(rank)  # noqa: E731
    with pytest.raises(OwnershipError, match="they step 4 elements of 'a', which has 8"):
        owners_of("one part", SimpleNamespace(pieces=some), [cut], world)
    two = Given([*whole, *whole, []])
    with pytest.raises(OwnershipError, match="they step 16 elements of 'a', which has 8"):
        owners_of("twice", two, [A], world_of(3))


def test_expert_parameters_are_owned_over_their_own_ranks():
    """Three dense ranks, two expert ranks."""
    expert = spec_of("e", is_expert=True)
    dense = [[A.shard({}, 0, 3)], [A.shard({}, 3, 6)], [A.shard({}, 6)]]
    require_partition(
        "right", Given(dense, [[expert.shard({}, 4)], [expert.shard({}, 0, 4)]]), [A, expert], world_of(3, 2)
    )
    with pytest.raises(OwnershipError, match=r"2 expert data-parallel ranks, but no rank owns .* of 'e'"):
        require_partition("wrong", Given(dense, [[expert.shard({}, 4)], []]), [A, expert], world_of(3, 2))


def test_a_piece_of_another_group_is_refused():
    """It would be stepped by another optimizer."""
    with pytest.raises(OwnershipError, match="'a', which belongs to group 1, not to 0"):
        require_partition("wrong", Given([[A.shard({})]]), [spec_of("a", group=1)], World())


def test_boxes_tile_the_parameter():
    """Columns of a matrix, as a strategy for DTensors would own them."""
    matrix = spec_of("m", (4, 6))

    def columns(start, stop):
        size = stop - start
        return Shard("m", (4, 6), ((0, start), (4, size)), 0, 4 * size)

    require_partition("right", Given([[columns(0, 2)], [columns(2, 6)]]), [matrix], world_of(2))
    for dense, message in (
        ([[columns(0, 2)], [columns(3, 6)]], "no rank owns 4 of the 24 elements of 'm'"),
        ([[columns(0, 3)], [columns(2, 6)]], "more than one rank owns the intersection of the boxes"),
        ([[columns(0, 3)], [matrix.shard({}, 12)]], r"no rank owns elements \[0, 12\)"),
    ):
        with pytest.raises(OwnershipError, match=message):
            require_partition("wrong", Given(dense), [matrix], world_of(2))
    with pytest.raises(OwnershipError, match=r"which has the shape \(4, 6\), not \(4, 7\)"):
        require_partition("wrong", Given([[Shard("m", (4, 7), ((0, 0), (4, 7)), 0, 28)]]), [matrix], World())


@pytest.mark.parametrize(
    ("check", "home", "said"),
    [
        (require_partition, "megaopt_testing.partition", r"more than one rank owns elements \[0, 1\)"),
        (owners_of, "megaopt_core.sharding._ownership", "they step 9 elements of 'p0', which has 8"),
    ],
)
def test_a_replicated_layout_is_not_asked_for_every_rank(monkeypatch, check, home, said):
    """Nor is one whose ranks have slices of everything: what two of the first ranks own is found all the same."""
    specs = [spec_of(f"p{index}") for index in range(4)]
    asked = []
    real = ReplicatedLayout.pieces
    monkeypatch.setattr(
        ReplicatedLayout, "pieces", lambda self, rank: asked.append(rank.get("dp")) or real(self, rank)
    )
    check("replicated", ReplicatedLayout(tuple(specs)), specs, world_of(512, 512))
    assert set(asked) <= {0, 511, None}
    assert len(asked) <= 3
    monkeypatch.setattr(f"{home}._MOST_SLICES", 8)
    dense = [[spec.shard({}, rank, rank + 1) for spec in specs] for rank in range(8)]
    check("bounded", Given(dense), specs, world_of(8))
    dense[0] = [spec.shard({}) for spec in specs]
    dense[1] = [spec.shard({}, 0, 1) for spec in specs]
    with pytest.raises(OwnershipError, match=said):
        check("bounded", Given(dense), specs, world_of(8))


@needs_distributed
@settings(max_examples=60)
@given(
    st.lists(st.integers(0, 700), max_size=8),
    st.integers(1, 9),
    st.integers(1, 9),
    st.one_of(st.none(), st.integers(1, 2000)),
    st.booleans(),
)
def test_layouts_for_as_many_ranks_as_there_are_are_partitions(
    sizes, ranks, planned, bucket_size, in_buffers
):
    """In buffers that were planned for another number of ranks, the check finds what would be left out."""
    specs = [spec_of(f"p{index}", (size,), is_expert=index % 3 == 2) for index, size in enumerate(sizes)]
    options = LayoutOptions(bucket_size)
    if in_buffers:
        buffers = lay_out_buffers(specs, world_of(planned, planned), options)
        options = LayoutOptions(bucket_size, buffers=buffers)
    layout = get_registry().strategy("distributed").layout(specs, world_of(ranks, ranks), options)
    left_out = in_buffers and any(
        low + (high - low) // ranks * ranks < stop
        for buffer in options.buffers.values()
        for low, high in buffer.buckets
        for start, stop in buffer.param_ranges.values()
        if low <= start < stop <= high
    )
    for check, said in ((require_partition, "no rank owns"), (owners_of, "they step")):
        if left_out:
            with pytest.raises(OwnershipError, match=said):
                check("distributed", layout, specs, world_of(ranks, ranks))
        else:
            check("distributed", layout, specs, world_of(ranks, ranks))


# Process groups.


def net() -> nn.Sequential:
    """Two layers."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4))


def over_pairs(rank: int, size: int) -> tuple[list[bool], str]:
    """Wrap over pairs of ranks, build without process groups, then with the world's; return what came of both."""
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    pair = pairs[rank // 2]
    pgs = ProcessGroupCollection(dp=pair, dp_cp=pair, expt_dp=pair)
    model = DistributedDataParallel(net(), SHARDED, pgs)
    settings = {"lr": 0.1, "sharding": "distributed", "clip_grad": 0.0}
    optimizer = build_optimizer(model, "sgd", **settings)
    generator = torch.Generator().manual_seed(rank)
    model(torch.randn(4, 16, generator=generator)).square().mean().backward()
    optimizer.step()
    moved = [
        bool((new != old).all()) for new, old in zip(model.parameters(), net().parameters(), strict=True)
    ]
    build_optimizer(model, "sgd", pg_collection=pgs, **settings)
    try:
        build_optimizer(model, "sgd", pg_collection=ProcessGroupCollection.from_default(), **settings)
    except ParallelGroupError as error:
        return moved, str(error)
    return moved, "no error"


@needs_distributed
@pytest.mark.distributed
def test_the_optimizer_takes_the_groups_that_the_model_is_wrapped_with(launch):
    """Every element is stepped; other groups are refused, naming the ranks."""
    for rank, (moved, error) in enumerate(launch(over_pairs, 4)):
        assert moved == [True] * 4
        assert f"dense data-parallel ranks {[[0, 1], [2, 3]][rank // 2]} and [0, 1, 2, 3]" in error
