"""Experts of a batch on several owners: their state goes to any world, and a resume may begin without gradients."""

import sys
from collections.abc import Collection
from pathlib import Path

import pytest
import torch
from long_runs import sometimes
from torch import nn

from megaopt_core.optimizers import MegatronOptimizer

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[3] / "plugins/megaopt-checkpoint/tests"))

pytest.importorskip("megaopt_layerwise")
pytest.importorskip("megaopt_muon")
from layerwise_runs import PLAIN, differing
from megaopt_checkpoint import load_checkpoint, save_checkpoint
from training import gathered, same

from megaopt_core import MatrixView, build_optimizer

pytestmark = [pytest.mark.any_python, pytest.mark.distributed]

SHAPES = {"experts": (7, 12, 16), "down": (7, 16, 12), "dense": (24, 16), "bias": (24,)}


def build(optimizer: str, sharding: str, dtype: torch.dtype) -> tuple[nn.Module, MegatronOptimizer]:
    """Return a model whose experts outweigh everything else, and its optimizer."""
    chance, model = torch.Generator().manual_seed(0), nn.Module()
    for name, shape in SHAPES.items():
        param = nn.Parameter(torch.randn(shape, generator=chance).to(dtype))
        if len(shape) > 1:
            param.matrix_view = MatrixView(batch_dims=len(shape) - 2)
        model.register_parameter(name, param)
    settings = {**PLAIN, "bf16": dtype is torch.bfloat16}
    return model, build_optimizer(model, optimizer, sharding=sharding, **settings)


def hop(
    rank: int,
    size: int,
    optimizer: str,
    sharding: str,
    dtype: torch.dtype,
    source: str | None,
    target: str | None,
    steps: range,
    missing: Collection[str] = (),
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], dict[str, torch.Tensor], dict[str, str]]:
    """Load; step, of which the first lacks some gradients; save. Return states, values, and who owns what."""
    model, stepper = build(optimizer, sharding, dtype)
    if source:
        with torch.no_grad():
            for param in model.parameters():
                param.zero_()
        load_checkpoint(source, model, stepper)
    loaded = gathered(stepper)
    for step in steps:
        chance = torch.Generator().manual_seed(step)
        for name, param in model.named_parameters():
            grad = torch.randn(param.shape, generator=chance).to(dtype)
            param.grad = None if step == steps[0] and name in missing else grad
        stepper.step()
    if target:
        save_checkpoint(target, model, stepper)
    owners = {row.name: row.owner for row in stepper.report().params}
    values = {name: param.detach().clone() for name, param in model.named_parameters()}
    return loaded, gathered(stepper), values, owners


@pytest.mark.parametrize(
    ("optimizer", "dtype"),
    sometimes(
        [("muon", torch.float32), ("muon", torch.bfloat16), ("adaptive_muon", torch.bfloat16)],
        always=[("adaptive_muon", torch.bfloat16)],
    ),
)
def test_state_of_divided_batches_loads_at_any_other_world(launch, tmp_path, optimizer, dtype):
    """Saved by two ranks, by four, and by one; the first step after a load has no gradient of a divided batch."""
    missing = ("experts", "bias")
    for size, others in ((1, (2,)), (2, (3, 4)), (4, (2,))):
        source = str(tmp_path / str(size))
        given = optimizer, "layer_wise", dtype
        saving = launch(hop, size, *given, None, source, range(2))
        if size > 1:
            assert "," in saving[0][3]["experts"]
        further = hop(0, 1, optimizer, "replicated", dtype, source, None, range(2, 4), missing)
        assert same(further[0], saving[0][1])
        for other in others:
            for state, _, values, owners in launch(hop, other, *given, source, None, range(2, 4), missing):
                assert "," in owners["experts"]
                assert same(state, saving[0][1]), (size, other)
                assert differing(further[2], values) == [], (size, other)
