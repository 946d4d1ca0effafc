"""Who holds what and who transforms what under FSDP2, as pure data."""

import math

import pytest
import torch
from megaopt_fsdp.blocks import blocks_of
from megaopt_fsdp.grid import Grid
from megaopt_fsdp.layout import FsdpLayout, traffic
from megaopt_fsdp.owners import BUCKET_BYTES
from megaopt_testing import require_partition

from megaopt_core import Granularity, MatrixView, ParamSpec, get_registry
from megaopt_core.errors import ShardingError
from megaopt_core.params import MATRIX, AxisPlacement
from megaopt_core.sharding import LayoutOptions, World

pytestmark = pytest.mark.any_python


def matrix(
    name: str,
    shape: tuple[int, ...],
    *placements: AxisPlacement,
    view: MatrixView = MATRIX,
    is_expert: bool = False,
    granularity: Granularity = Granularity.TENSOR,
) -> ParamSpec:
    """Return a matrix whose optimizer offers a split step."""
    batch, rows, columns = math.prod(shape[:-2]), *shape[-2:]
    return ParamSpec(
        name,
        shape,
        torch.bfloat16,
        torch.bfloat16,
        "any",
        0,
        granularity,
        cost=float(batch * rows * columns * min(rows, columns)),
        view=view,
        placements=placements,
        is_expert=is_expert,
        splits=True,
    )


def cut(axis: str, size: int, dim: int = 0) -> AxisPlacement:
    """Return how an axis cuts a dimension."""
    return AxisPlacement(axis, size, dim=dim)


WORLDS = {
    "fsdp": (World({"dp": 4}), [cut("dp", 4)]),
    "hsdp": (World({"dp": 2, "dp_replicate": 3}), [cut("dp", 2)]),
    "fsdp x tp, columns": (World({"dp": 2, "tp": 3}), [cut("tp", 3, 1), cut("dp", 2)]),
    "fsdp x tp, rows twice": (World({"dp": 2, "tp": 3}), [cut("tp", 3), cut("dp", 2)]),
    "second dimension": (World({"dp": 3}), [cut("dp", 3, 1)]),
    "more ranks than rows": (World({"dp": 64}), [cut("dp", 64)]),
    "not cut": (World({"dp": 2, "tp": 2}), []),
}


@pytest.mark.parametrize("kind", WORLDS)
def test_every_element_is_owned_once(kind) -> None:
    """The core's own check of layouts passes, with matrices, vectors and a number."""
    world, placements = WORLDS[kind]
    element = Granularity.ELEMENT
    rows = [placement for placement in placements if placement.dim == 0]
    specs = [
        matrix("square", (13, 13), *placements),
        matrix("flat", (5, 40), *placements),
        matrix("bias", (13,) * 2, *rows, granularity=element),
        matrix("whole", (7, 3), granularity=element),
    ]
    strategy = get_registry().strategy("fsdp")
    layout = strategy.layout(specs, world, LayoutOptions())
    require_partition("fsdp", layout, specs, world)


@pytest.mark.parametrize("kind", WORLDS)
def test_parameters_without_elements_are_nobodys_twice(kind) -> None:
    """Every rank holds all of what is nothing, next to parameters that have elements."""
    world, placements = WORLDS[kind]
    rows = [placement for placement in placements if placement.dim == 0]
    specs = [
        matrix("flat", (5, 40), *placements),
        matrix("none", (0, 4), *placements),
        matrix("rows", (0, 4), *rows, granularity=Granularity.ELEMENT),
        matrix("columns", (4, 0), *rows, granularity=Granularity.ELEMENT),
    ]
    layout = get_registry().strategy("fsdp").layout(specs, world, LayoutOptions())
    require_partition("fsdp", layout, specs, world)


@pytest.mark.parametrize("kind", WORLDS)
def test_every_matrix_has_one_owner_who_gets_each_element_once(kind) -> None:
    """The parts that are sent tile the matrix, whatever the ranks hold besides."""
    world, placements = WORLDS[kind]
    layout = FsdpLayout([matrix(f"m{number}", (13, 11), *placements) for number in range(9)], world)
    grid = layout.grid(is_expert=False)
    assert grid.size == math.prod(world.axes.values())
    for owned in layout.owned(is_expert=False):
        seen = torch.zeros(13, 11)
        for place in owned.block.senders(owned.owner, grid):
            offsets, sizes = owned.block.spec.box(grid.rank(place))
            seen[tuple(slice(at, at + size) for at, size in zip(offsets, sizes, strict=True))] += 1
        assert bool((seen == 1).all())
        assert owned.owner in owned.block.holders


def test_copies_share_the_work_out() -> None:
    """Under HSDP owners stand in every copy of the model."""
    layout = FsdpLayout(
        [matrix(f"m{number}", (8, 8), cut("dp", 2)) for number in range(8)],
        World({"dp": 2, "dp_replicate": 2}),
    )
    owners = [owned.owner for owned in layout.owned(is_expert=False)]
    assert sorted(owners) == [0, 0, 1, 1, 2, 2, 3, 3]


def test_whole_experts_stay_where_they_are() -> None:
    """Experts that are dealt out over both axes travel nowhere; those whose rows are cut stay among their ranks."""
    world = World({"dp": 4, "ep": 2, "expert_dp": 2})
    view = MatrixView(batch_dims=1)
    grid = Grid.of(world, is_expert=True)
    dealt = matrix("dealt", (8, 6, 4), cut("ep", 2), cut("expert_dp", 2), view=view, is_expert=True)
    assert [(block.box, block.holders) for block in blocks_of(dealt, grid)] == [
        (((0, 0, 0), (2, 6, 4)), (0,)),
        (((4, 0, 0), (2, 6, 4)), (1,)),
        (((2, 0, 0), (2, 6, 4)), (2,)),
        (((6, 0, 0), (2, 6, 4)), (3,)),
    ]
    rows = matrix("rows", (8, 6, 4), cut("ep", 2), cut("expert_dp", 2, 1), view=view, is_expert=True)
    assert [(block.box, block.holders) for block in blocks_of(rows, grid)] == [
        (((0, 0, 0), (4, 6, 4)), (0, 2)),
        (((4, 0, 0), (4, 6, 4)), (1, 3)),
    ]
    assert set(traffic(FsdpLayout([dealt], world), {0}, is_expert=True).values()) == {0}


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_bytes_are_those_of_the_bound(ranks) -> None:
    """2 (1 - 1/n) times the bytes of all matrices in float32, over n ranks in the mean, and never far from it."""
    specs = [matrix(f"m{number}", (64, 32 + 16 * (number % 3)), cut("dp", ranks)) for number in range(48)]
    sent = traffic(FsdpLayout(specs, World({"dp": ranks})), {0}, is_expert=False)
    bound = 2 * (1 - 1 / ranks) * sum(4 * spec.numel for spec in specs) / ranks
    assert sum(sent.values()) / ranks == pytest.approx(bound)
    assert max(sent.values()) <= 1.1 * bound


def test_buckets_are_limited_and_level() -> None:
    """No owner gets much more than the limit at once, and all have about as much to do in each bucket."""
    specs = [matrix(f"m{number}", (1024, 1024), cut("dp", 4)) for number in range(96)]
    layout = FsdpLayout(specs, World({"dp": 4}))
    buckets = layout.buckets({0}, is_expert=False)
    assert len(buckets) == 24 * 2**22 / BUCKET_BYTES
    for bucket in buckets:
        loads = [
            sum(4 * each.block.spec.numel for each in bucket.owned if each.owner == at) for at in range(4)
        ]
        assert loads == [BUCKET_BYTES] * 4


def test_axes_that_nobody_knows_are_named() -> None:
    """What a mesh calls otherwise, and what only some ranks of an axis have."""
    strategy = get_registry().strategy("fsdp")
    unknown = matrix("w", (4, 4), cut("mesh.fast", 2))
    with pytest.raises(
        ShardingError, match=r"cannot take 'w': it is cut along dimension 0 over the 2 ranks of 'mesh.fast'"
    ):
        strategy.layout([unknown], World({"dp": 2}), LayoutOptions())
    expert = matrix("e", (4, 4), AxisPlacement("ep", 2, index=1))
    with pytest.raises(ShardingError, match=r"cannot take 'e': only the ranks at 1 of 'ep' have it"):
        strategy.layout([expert], World({"dp": 2, "ep": 2}), LayoutOptions())
