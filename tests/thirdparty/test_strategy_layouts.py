"""Layouts of outsiders' strategies and of ours for 512 ranks along many axes: pure data, no processes."""

import math
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from megaopt_testing import require_partition

from megaopt_core.sharding import ParamLayout

sys.path.insert(0, str(Path(__file__).parent))

from megaopt_core import Granularity, MatrixView, ParamSpec, get_registry
from megaopt_core.params import AxisPlacement
from megaopt_core.sharding import LayoutOptions, World

STAGES, TENSOR, DATA, EXPERT = 4, 4, 32, 8
"""512 ranks: 4 pipeline stages of 4 tensor-parallel and 32 data-parallel ranks; 8 of these 32 divide the experts."""

WORLD = World(
    {
        "pp": STAGES,
        "tp": TENSOR,
        "dp": DATA,
        "ep": EXPERT,
        "expert_dp": DATA // EXPERT,
        "expert_tp": TENSOR,
    }
)
WIDTH = 1024
LAYER = {
    "norm.weight": ((WIDTH,), None, None),
    "qkv.weight": ((3 * WIDTH, WIDTH), 0, MatrixView(split_sizes=(WIDTH, WIDTH, WIDTH))),
    "qkv.bias": ((3 * WIDTH,), 0, None),
    "out.weight": ((WIDTH, WIDTH), 1, MatrixView()),
    "router.weight": ((64, WIDTH), None, MatrixView()),
    "router.scale": ((), None, None),
    "experts.up": ((64, 4 * WIDTH, WIDTH), None, MatrixView(batch_dims=1)),
    "experts.down": ((64, WIDTH, 4 * WIDTH), None, MatrixView(batch_dims=1)),
}
COPIES = {"replicated": DATA, "pairs": 2}
"""How many ranks that share the optimizer out own each element; one, where nothing is said."""


def specs_of(granularity: Granularity) -> list[ParamSpec]:
    """Return the parameters of 12 layers in each of the stages, as all ranks see them."""
    specs = []
    for layer in range(12 * STAGES):
        stage = AxisPlacement("pp", STAGES, index=layer // 12)
        for name, (shape, cut, view) in LAYER.items():
            placements = [stage]
            if cut is not None:
                placements.append(AxisPlacement("tp", TENSOR, dim=cut))
            if "experts" in name:
                placements.append(AxisPlacement("ep", EXPERT, dim=0))
            specs.append(
                ParamSpec(
                    f"layers.{layer}.{name}",
                    shape,
                    torch.bfloat16,
                    torch.float32,
                    "any",
                    int("experts" in name),
                    granularity,
                    float(math.prod(shape)),
                    view=view,
                    placements=tuple(placements),
                    is_expert="experts" in name,
                    takes_peers=True,
                )
            )
    return specs


def every_rank() -> Iterator[dict[str, int]]:
    """Yield the coordinates of all 512."""
    for pp in range(STAGES):
        for tp in range(TENSOR):
            for dp in range(DATA):
                expert = {"ep": dp % EXPERT, "expert_dp": dp // EXPERT, "expert_tp": tp}
                yield {"pp": pp, "tp": tp, "dp": dp, **expert}


def owned_by_all(layout: ParamLayout) -> dict[str, int]:
    """Return how many elements of each parameter all ranks together step."""
    owned = {}
    for rank in every_rank():
        for piece in layout.pieces(rank):
            for _, shard in piece.members:
                owned[shard.name] = owned.get(shard.name, 0) + shard.numel
    return owned


@pytest.mark.parametrize(
    "name", ["round_robin", "row_blocks", "by_expert", "pairs", "parts", "replicated", "distributed"]
)
def test_512_ranks_share_every_element_out(strategies, monkeypatch, name):
    """Each element has its owners, and as many as the strategy says; checked by the core, and counted here."""
    from megaopt_core.registry import PluginRegistry, reset_registry

    monkeypatch.syspath_prepend(strategies)
    if name == "distributed":
        pytest.importorskip("megaopt_distributed")
    reset_registry(PluginRegistry())
    try:
        strategy = get_registry().strategy(name)
    finally:
        reset_registry()
    finest = Granularity.ELEMENT if Granularity.ELEMENT in strategy.granularities else Granularity.TENSOR
    specs = specs_of(finest)
    if name == "parts":  # it takes what nothing else divides
        specs = [spec for spec in specs if not spec.is_expert and len(spec.dividing) == 1]
    begun = time.process_time()
    layout = strategy.layout(specs, WORLD, LayoutOptions())
    require_partition(name, layout, specs, WORLD)
    seconds = time.process_time() - begun
    owned = owned_by_all(layout)
    assert owned.keys() == {spec.name for spec in specs}
    for spec in specs:
        model_copies = 1 if any(placement.axis == "tp" for placement in spec.placements) else TENSOR
        copies = COPIES.get(name, 1)
        if name == "replicated" and spec.is_expert:
            copies = DATA // EXPERT
        if name == "parts" and not spec.shape:
            copies = DATA
        assert owned[spec.name] == spec.numel * model_copies * copies, spec
    assert seconds < 60
