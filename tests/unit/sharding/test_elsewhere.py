"""Parameters that only some ranks have: scalars and tensors without elements too."""

import pytest
import torch
from megaopt_testing import require_partition

from megaopt_core import Granularity, ParamSpec, get_registry
from megaopt_core.params import AxisPlacement
from megaopt_core.sharding import LayoutOptions, World

WORLD = World({"pp": 2, "dp": 2})


def of_stage(stage: int, name: str, shape: tuple[int, ...]) -> ParamSpec:
    """Return a parameter of one pipeline stage."""
    placements = (AxisPlacement("pp", 2, index=stage),)
    numel = float(torch.Size(shape).numel())
    return ParamSpec(
        name,
        shape,
        torch.float32,
        torch.float32,
        "adam",
        0,
        Granularity.ELEMENT,
        numel,
        placements=placements,
    )


SPECS = [
    of_stage(0, "gain", ()),
    of_stage(1, "late.gain", ()),
    of_stage(1, "none", (0, 4)),
    of_stage(1, "w", (4, 8)),
]


@pytest.mark.parametrize("name", ["replicated", "distributed"])
def test_ranks_of_other_stages_step_none_of_it(name):
    """A scalar has no part that could be empty, and still belongs to its stage alone."""
    if name not in get_registry().strategies():
        pytest.skip("megaopt-distributed is not installed")
    layout = get_registry().strategy(name).layout(SPECS, WORLD, LayoutOptions())
    require_partition(name, layout, SPECS, WORLD)
    for stage, mine in ((0, {"gain"}), (1, {"late.gain", "none", "w"})):
        pieces = [piece for dp in range(2) for piece in layout.pieces({"pp": stage, "dp": dp})]
        stepped = {shard.name for piece in pieces for _, shard in piece.members}
        assert mine - {"none"} <= stepped <= mine


def test_a_shard_of_what_is_elsewhere_is_empty():
    """Whatever its shape."""
    assert [spec.shard({"pp": 0}).numel for spec in SPECS] == [1, 0, 0, 0]
    assert [spec.shard({"pp": 1}).numel for spec in SPECS] == [0, 1, 0, 32]
    assert [spec.held_by({"pp": 1}) for spec in SPECS] == [False, True, True, True]
