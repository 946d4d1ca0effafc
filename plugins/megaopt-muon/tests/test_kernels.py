"""Kernels that the matrix library compiles: only in the first step."""

import os
import subprocess
import sys

import pytest
import torch
from long_runs import sometimes
from megaopt_muon.products.onednn import is_multiplied

pytestmark = pytest.mark.any_python

CODE = """
import sys, torch
from megaopt_muon.products import precision
from megaopt_muon.muon import TensorParallelMuon
precision.multiplies_bfloat16 = lambda: True
torch.set_num_threads(1)
shapes = eval(sys.argv[3])
params = [torch.nn.Parameter(torch.randn(shape)) for shape in shapes]
kind = {"coefficient_type": sys.argv[2], "fp32_matmul_prec": sys.argv[4]}
optimizer = TensorParallelMuon(params, ns_plan=sys.argv[1], **kind)
for step in range(3):
    for param in params:
        # Of other size and other spectrum in every step: what depends on them must not be compiled in.
        param.grad = torch.randn(param.shape) * 10.0 ** (step - 2)
        param.grad[step].mul_(1.0 + step)
    print("step", step, flush=True)
    optimizer.step()
print("end", flush=True)
"""


SHAPES = [(512, 256), (256, 768), (448, 512), (48, 100), (100, 48), (64, 64)]


def compiled(
    plan: str, coefficients: str, shapes: list[tuple[int, int]], precision: str = "medium"
) -> list[int]:
    """Return how many kernels oneDNN compiled in each step."""
    found = subprocess.run(
        [sys.executable, "-c", CODE, plan, coefficients, str(shapes), precision],
        env={**os.environ, "ONEDNN_VERBOSE": "profile_create", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    steps = found.stdout.split("step ")[1:]
    return [text.count("create:cache_miss") for text in steps]


@pytest.mark.parametrize(
    ("plan", "coefficients"),
    sometimes(
        [
            ("", "cans"),
            ("256x768:gram 256x512:gram 448x512:gram", "quintic"),
            ("256x768:plain 256x512:plain", "simple"),
        ],
        always=[("", "cans"), ("256x768:gram 256x512:gram 448x512:gram", "quintic")],
    ),
)
def test_only_the_first_step_compiles(plan, coefficients):
    """With new gradients in every step, of new norm and spectrum, later steps find every kernel compiled."""
    first, *later = compiled(plan, coefficients, SHAPES)
    # Where oneDNN knows no bfloat16, torch multiplies by other means, and nothing is compiled at all.
    assert (first > 0) == torch.ops.mkldnn._is_mkldnn_bf16_supported()
    assert later == [0, 0]


@pytest.mark.skipif(not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="oneDNN knows no bfloat16 here")
def test_steps_of_different_coefficients_share_kernels():
    """Of five steps, each of its own coefficients, the Gram matrices take one and the products with X one kernel."""
    polynomials = 5
    assert compiled("", "quintic", [(64, 128)] * 2) == [1 + polynomials + 1, 0, 0]


@pytest.mark.skipif(
    not is_multiplied(256, torch.float32, torch.device("cpu")), reason="no products of oneDNN's in float32"
)
@pytest.mark.parametrize("coefficients", ["quintic", "cans"])
def test_in_float32_only_the_first_step_compiles(coefficients):
    """Also by oneDNN, for as many shapes as it would not keep kernels of if none were filled up."""
    shapes = [(128 + 29 * row, 150 + 31 * (row + column)) for row in range(9) for column in range(9)]
    plan = " ".join(f"{min(shape)}x{max(shape)}:plain+onednn" for shape in shapes)
    first, *later = compiled(plan, coefficients, shapes, "highest")
    assert 0 < first < 300
    assert later == [0, 0]
