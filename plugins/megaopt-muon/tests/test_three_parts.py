"""A step is three parts, of which the first and the last may run on slices."""

import itertools

import pytest
import torch
from long_runs import sometimes
from megaopt_muon.muon import TensorParallelMuon
from megaopt_muon.products.workspace import Workspace
from megaopt_muon.step.elementwise import MomentumStep, subtract
from torch import nn

from megaopt_core.params import MatrixView, ParamInfo, Role

pytestmark = pytest.mark.any_python

SHAPES = [(256, 300), (600, 260), (24, 40), (40, 24), (768, 256)]
SETTINGS = {"lr": 0.02, "momentum": 0.9, "weight_decay": 0.1}


def parameters() -> list[nn.Parameter]:
    """Return parameters with gradients, one of them fused."""
    generator = torch.Generator().manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]
    for param in params:
        param.grad = torch.randn(param.shape, generator=generator)
    params[-1].param_info = ParamInfo("w", Role.MATRIX, MatrixView(split_sizes=(256, 256, 256)))
    return params


@pytest.mark.parametrize(
    ("decoupled", "nesterov", "dtype"),
    sometimes(
        itertools.product([True, False], [True, False], ["in_bfloat16", "in_float32"]),
        always=[
            *itertools.product([True, False], [True, False], ["in_float32"]),
            (True, True, "in_bfloat16"),
            (False, False, "in_bfloat16"),
        ],
    ),
)
def test_a_step_is_its_parts(request, dtype, nesterov, decoupled):
    """Updates, whole matrices, application: with the changes written out between them, bit for bit."""
    request.getfixturevalue(dtype)
    whole, parts = parameters(), parameters()
    first, second = (
        TensorParallelMuon(params, nesterov=nesterov, use_decoupled_weight_decay=decoupled, **SETTINGS)
        for params in (whole, parts)
    )
    for _ in range(2):
        first.step()
        (group,) = second.param_groups
        second._init_group(group)
        with torch.no_grad():
            updates = second._local_updates(group, parts)
            updates = [update.clone() for update in updates]  # as if they had travelled
            written = [torch.empty_like(param) for param in parts]
            for change in second._transform(group, parts, updates):
                target = written[change.index]
                target = change.piece.window(target) if change.piece is not None else target
                target.copy_(change.values).mul_(change.scale)
            for param, change in zip(parts, written, strict=True):
                if decoupled:  # decay comes with the update
                    param.mul_(1.0 - group["lr"] * group["weight_decay"])
                param.add_(change, alpha=-group["lr"])
    assert all(torch.equal(a, b) for a, b in zip(whole, parts, strict=True))


@pytest.mark.parametrize("out", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("added_decay", [0.0, 0.1])
@pytest.mark.parametrize("cut", [8, 1000, (1 << 17) + 24])
def test_the_first_part_commutes_with_slicing(out, nesterov, added_decay, cut):
    """Of a slice it computes what it computes of the whole, and both are torch's operations on whole tensors."""
    torch.manual_seed(1)
    param, grad, buffer = torch.randn(3, 1 << 18)
    expected_param, expected_buffer = param.clone(), buffer.clone()
    step = MomentumStep(momentum=0.9, added_decay=added_decay, nesterov=nesterov, workspace=Workspace())
    source = grad.add(param, alpha=added_decay) if added_decay else grad
    expected_buffer.lerp_(source, 1.0 - 0.9)
    expected = (source.lerp(expected_buffer, 0.9) if nesterov else expected_buffer).to(out)
    update = torch.empty(param.shape, dtype=out)
    squares = [
        step(param[part], grad[part], buffer[part], update[part])
        for part in (slice(None, cut), slice(cut, None))
    ]
    exact = (source.lerp(expected_buffer, 0.9) if nesterov else expected_buffer).double().square().sum()
    torch.testing.assert_close(torch.tensor(sum(squares)).double(), exact, rtol=1e-5, atol=0)
    assert torch.equal(param, expected_param)
    assert torch.equal(buffer, expected_buffer)
    assert torch.equal(update, expected)


@pytest.mark.parametrize("lr", [0.02, torch.tensor(0.02)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_last_part_commutes_with_slicing(lr, dtype):
    """Also of windows that are not contiguous."""
    torch.manual_seed(2)
    target, update = torch.randn(700, 2, 300), torch.randn(700, 300).to(dtype)
    whole, sliced, workspace = target.clone(), target.clone(), Workspace()
    subtract(whole[:, 1], update, lr, 0.3, workspace)
    for part in (slice(None, 8), slice(8, 500), slice(500, None)):
        subtract(sliced[part, 1], update[part], lr, 0.3, workspace)
    assert torch.equal(whole, sliced)
    torch.testing.assert_close(whole[:, 1], target[:, 1] - 0.02 * 0.3 * update.float(), rtol=0, atol=1e-6)
    assert torch.equal(whole[:, 0], target[:, 0])
