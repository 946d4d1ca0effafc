"""Muon's iteration on a GPU against float64, and its step against the one of a CPU."""

import copy
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from device_training import relative

pytest.importorskip("megaopt_muon")
from megaopt_muon.coefficients import resolve_coefficients
from megaopt_muon.muon import TensorParallelMuon
from megaopt_muon.newton_schulz.iteration import NewtonSchulz

SPECTRA = {"flat": 0.0, "falling": 0.75, "steep": 2.0}
COEFFICIENTS = ["quintic", "simple", "polar_express"]


def update_of(spectrum: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Return matrices of known singular values, of a norm far from 1."""
    *batch, rows, columns = shape
    small = min(rows, columns)
    chance = torch.Generator().manual_seed(0)
    left, right = (
        torch.linalg.qr(torch.randn(*batch, size, small, generator=chance, dtype=torch.float64))[0]
        for size in (rows, columns)
    )
    return 3e-5 * (left * torch.arange(1, small + 1) ** -SPECTRA[spectrum]) @ right.mT


def steps_of(update: torch.Tensor, coefficients: tuple[tuple[float, float, float], ...]) -> torch.Tensor:
    """Return the formula, in the update's dtype."""
    tall = update.shape[-2] > update.shape[-1]
    x = update.mT if tall else update
    x = (x / torch.linalg.matrix_norm(x.double(), keepdim=True)).to(x.dtype)
    for a, b, c in coefficients:
        gram = x @ x.mT
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    return x.mT if tall else x


@pytest.mark.parametrize("method", ["auto", "gram", "standard"])
@pytest.mark.parametrize("coefficients", COEFFICIENTS)
@pytest.mark.parametrize("spectrum", SPECTRA)
@pytest.mark.parametrize(
    "shape", [(64, 256), (512, 512), (768, 2304), (2304, 768), (3, 640, 1280), (1, 1), (4, 40, 7)]
)
def test_it_is_as_accurate_as_the_formula_in_bfloat16(device, shape, spectrum, coefficients, method):
    """Against float64, relative to the Frobenius norm; 1.5 times what bfloat16 leaves where products are small."""
    update, triples = update_of(spectrum, shape).to(device), resolve_coefficients(coefficients, 5)
    exact = steps_of(update, triples)

    def error(result: torch.Tensor) -> float:
        return float(torch.linalg.vector_norm(result.double() - exact) / torch.linalg.vector_norm(exact))

    found = error(NewtonSchulz(triples, "medium", method)(update.float()))
    assert found <= 1.5 * error(steps_of(update.bfloat16(), triples)) + 1e-3


@pytest.mark.parametrize("precision", ["medium", "highest"])
@pytest.mark.parametrize("cautious", [False, True])
def test_a_step_is_that_of_a_cpu(device, precision, cautious):
    """Many shapes, some of them several times, wide and tall, in one step."""
    chance = torch.Generator().manual_seed(0)
    shapes = [(96, 64), (64, 96), (640, 1920), (640, 1920), (8, 8), (8, 8), (1, 5)]
    params = [torch.nn.Parameter(torch.randn(shape, generator=chance)) for shape in shapes]
    there = [torch.nn.Parameter(param.detach().clone().to(device)) for param in params]
    runs = []
    for tensors in (params, there):
        optimizer = TensorParallelMuon(
            tensors, 0.02, 0.9, True, 0.1, fp32_matmul_prec=precision, cautious_weight_decay=cautious
        )
        chance = torch.Generator().manual_seed(1)
        for _ in range(3):
            for param, shape in zip(tensors, shapes, strict=True):
                param.grad = torch.randn(shape, generator=chance).to(param.device)
            optimizer.step()
        runs.append({str(index): param.detach().double().cpu() for index, param in enumerate(tensors)})
    # Where an update is nearly 0, one of them may decay what the other does not.
    flips = 0.02 * 0.1 if cautious else 0.0
    assert relative(*runs) <= flips + (1e-4 if precision == "highest" else 2e-3)


def test_a_copy_steps_on(device):
    """A deep copy has the memory that its next step needs."""
    param = torch.nn.Parameter(torch.randn(640, 1280, generator=torch.Generator().manual_seed(0)).to(device))
    optimizer = TensorParallelMuon([param], 0.02, 0.9, True, 0.0)
    param.grad = torch.ones_like(param)
    optimizer.step()
    other = copy.deepcopy(optimizer)
    (twin,) = other.param_groups[0]["params"]
    twin.grad = param.grad.clone()
    optimizer.step()
    other.step()
    assert torch.equal(param, twin)
