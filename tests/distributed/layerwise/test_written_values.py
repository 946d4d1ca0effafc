"""Weights that are written after the build reach owners that only an exchange brings them to."""

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from long_runs import sometimes

sys.path.insert(0, str(Path(__file__).parent))

pytest.importorskip("megaopt_layerwise")
pytest.importorskip("megaopt_muon")
from tensor_parallel import build, cut, step_with
from torch import nn

pytestmark = [pytest.mark.any_python, pytest.mark.distributed]

STEPS = 4


def write(model: nn.Module, way: str) -> None:
    """Halve weights, in one of the ways in which people write to models."""
    if way == "load_state_dict":
        model.load_state_dict({name: value * 0.5 for name, value in model.state_dict().items()})
        return
    with torch.no_grad():
        for param in model.parameters():
            if way == "mul_":
                param.mul_(0.5)
            elif way == "data":
                param.data.mul_(0.5)
            else:
                param.data.view(-1)[-1] *= 0.5  # not all of what a rank holds


def halved(
    rank: int, size: int, tp: int, cases: Iterable[tuple[str, int]], bf16: bool, settings: dict[str, Any]
) -> list[tuple[dict[str, torch.Tensor], int, tuple[str, ...]]]:
    """Step, and write to the model of every rank before one of the steps: for each way and step."""
    dtype, sharding = torch.bfloat16 if bf16 else torch.float32, "layer_wise" if size > 1 else "replicated"
    found = []
    for way, at in cases:
        model, stepper, place = build("muon", sharding, tp, size, dtype, bf16=bf16, **settings)
        for step in range(STEPS):
            if step == at:
                write(model, way)
            step_with(model, stepper, place, tp, step, dtype)
        values = {name: param.detach().clone() for name, param in model.named_parameters()}
        found.append((values, place, stepper.check()))
    return found


@pytest.mark.parametrize("bf16", sometimes([False, True], [True]))
def test_owners_of_cut_matrices_take_over_what_is_written(launch, bf16):
    """The parts of two tensor-parallel ranks, with main values too, get the bits of one process."""
    cases = [("load_state_dict", 0), ("load_state_dict", 2), ("mul_", 2), ("data", 2)]
    expected = [values for values, *_ in halved(0, 1, 1, cases, bf16, {})]
    for ranks in launch(halved, 2, 2, cases, bf16, {}):
        for whole, (found, place, differences) in zip(expected, ranks, strict=True):
            assert differences == ()
            for name, value in found.items():
                assert torch.equal(value, cut(name, whole[name], 2, place)), name


def test_peers_take_over_what_is_written(launch):
    """Columns have memory of their own, also where only one peer holds the rows that were written."""
    exact = {"muon_fp32_matmul_prec": "highest"}
    cases = [("load_state_dict", 0), ("mul_", 2), ("data", 2), ("few", 2)]
    expected = [values for values, *_ in halved(0, 1, 1, cases, False, exact)]
    for ranks in launch(halved, 2, 1, cases, False, {**exact, "peers_per_matrix": 2}):
        for whole, (found, _, differences) in zip(expected, ranks, strict=True):
            assert differences == ()
            for name, value in found.items():
                torch.testing.assert_close(value, whole[name], rtol=1e-5, atol=1e-5)
