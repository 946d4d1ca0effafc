"""State: named tensors, one set for each matrix, that survive a checkpoint bit for bit."""

import copy
import io
from typing import Any

import pytest
import torch
from megaopt_soap.soap import SOAP, init_state
from torch import nn

from megaopt_core import build_optimizer
from megaopt_core.errors import CheckpointMismatchError
from megaopt_core.params import MatrixView, ParamInfo, Role

pytestmark = pytest.mark.any_python

SETTINGS = {"lr": 0.02, "weight_decay": 0.1, "eps": 1e-6}
VIEWS = [
    (MatrixView(split_sizes=(2, 3, 1)), (6, 8)),
    (MatrixView(split_sizes=(2, 1, 1)), (12, 8)),
    (MatrixView(split_sizes=(1, 1)), (6, 8)),
    (MatrixView(split_sizes=(2, 2), split_dim=1), (6, 8)),
    (MatrixView(transposed=True), (6, 8)),
    (MatrixView(split_sizes=(2, 1, 1), transposed=True), (8, 12)),
    (MatrixView(batch_dims=1), (3, 6, 8)),
    (MatrixView(batch_dims=1, transposed=True, split_sizes=(2, 2)), (3, 6, 8)),
    (MatrixView(), (6, 2, 2, 2)),
]


def gradients(shape: tuple[int, ...], count: int, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    """Return Gaussian gradients."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).to(dtype) for _ in range(count)]


def parameter(
    shape: tuple[int, ...], view: MatrixView | None = None, dtype: torch.dtype = torch.float64
) -> nn.Parameter:
    """Return a parameter that is seen through a view."""
    param = nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype))
    if view is not None:
        param.param_info = ParamInfo("weight", Role.MATRIX, view)
    return param


def alone(view: MatrixView, tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return every matrix of a tensor, experts apart, in memory of its own."""
    matrices = [matrix.reshape(-1, *matrix.shape[-2:]) for matrix in view.matrices(tensor)]
    return [member.detach().clone() for matrix in matrices for member in matrix]


def begin_with_full_rank(optimizer: torch.optim.Optimizer) -> None:
    """Give all factors the eigenvalues 1, 2, 3...: what is in a null space is decided by rounding."""
    init_state(optimizer)
    for state in optimizer.state.values():
        state["step"].fill_(3)
        for key, value in state.items():
            size = value.shape[-1] if value.dim() else 0
            if "factor" in key:
                value.copy_(torch.arange(1.0, size + 1).diag())
            elif "basis" in key:
                value.copy_(torch.eye(size).flip(0))
            elif "eigenvalues" in key:
                value.copy_(torch.arange(size, 0.0, -1.0))


@pytest.mark.parametrize("kl", [False, True])
@pytest.mark.parametrize("frequency", [1, 2])
@pytest.mark.parametrize(("view", "shape"), VIEWS, ids=[f"{view} {shape}" for view, shape in VIEWS])
def test_each_matrix_has_bases_of_its_own(view, shape, frequency, kl):
    """A fused weight is stepped as its matrices are, one by one."""
    settings = {**SETTINGS, "use_kl_shampoo": kl, "precondition_frequency": frequency}
    param = parameter(shape, view)
    separate = [nn.Parameter(matrix) for matrix in alone(view, param)]
    fused, apart = SOAP([param], **settings), SOAP(separate, **settings)
    begin_with_full_rank(fused)
    begin_with_full_rank(apart)
    for grad in gradients(shape, 6):
        param.grad = grad
        for matrix, part in zip(separate, alone(view, grad), strict=True):
            matrix.grad = part
        fused.step()
        apart.step()
    for ours, matrix in zip(alone(view, param), separate, strict=True):
        torch.testing.assert_close(ours, matrix.detach(), rtol=0, atol=1e-9)


def test_a_parameter_in_any_memory_is_stepped_in_place():
    """Also one whose matrix cannot be a view of it."""
    shape = (4, 2, 3, 3)
    param = nn.Parameter(torch.zeros(shape).to(memory_format=torch.channels_last))
    address, plain = param.data_ptr(), nn.Parameter(torch.zeros(shape))
    optimizers = [SOAP([tensor], **SETTINGS) for tensor in (param, plain)]
    for optimizer in optimizers:
        begin_with_full_rank(optimizer)
    for grad in gradients(shape, 3, torch.float32):
        param.grad, plain.grad = grad.to(memory_format=torch.channels_last), grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    assert param.data_ptr() == address
    torch.testing.assert_close(param, plain)


def test_state_is_made_without_a_gradient():
    """Every tensor of every matrix by its name, in the shapes that it keeps."""
    param = parameter((3, 6, 8), MatrixView(batch_dims=1, split_sizes=(2, 4)), torch.float32)
    optimizer = SOAP([param], use_kl_shampoo=True, max_precond_dim=7)
    before = param.detach().clone()
    init_state(optimizer)
    shapes = {key: tuple(value.shape) for key, value in optimizer.state[param].items()}
    assert torch.equal(param.detach(), before)
    assert shapes == {
        "step": (),
        "exp_avg_is_rotated": (),
        "exp_avg": (3, 2, 8),
        "exp_avg_sq": (3, 2, 8),
        "left_factor": (3, 2, 2),
        "left_basis": (3, 2, 2),
        "left_eigenvalues": (3, 2),
        "exp_avg_1": (3, 4, 8),
        "exp_avg_sq_1": (3, 4, 8),
        "left_factor_1": (3, 4, 4),
        "left_basis_1": (3, 4, 4),
        "left_eigenvalues_1": (3, 4),
    }
    param.grad = torch.ones_like(param)
    optimizer.step()
    assert {key: tuple(value.shape) for key, value in optimizer.state[param].items()} == shapes


def test_an_empty_parameter_and_one_without_a_gradient_have_no_state():
    """There is nothing to step."""
    params = [nn.Parameter(torch.zeros(0, 4)), nn.Parameter(torch.ones(2, 2))]
    optimizer = SOAP(params)
    params[0].grad = torch.zeros(0, 4)
    optimizer.step()
    assert len(optimizer.state) == 0
    assert (params[1] == 1).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("frequency", [1, 4])
@pytest.mark.parametrize("kl", [False, True])
def test_a_run_goes_on_from_a_checkpoint_bit_for_bit(kl, frequency, dtype):
    """Saved between two refreshes, and loaded with `weights_only`, into memory of its own."""
    shape = (300, 12)
    settings = {**SETTINGS, "use_kl_shampoo": kl, "precondition_frequency": frequency}
    through, again = parameter(shape, dtype=dtype), parameter(shape, dtype=dtype)
    first, second = SOAP([through], **settings), SOAP([again], **settings)
    grads = gradients(shape, 9, dtype)
    for number, grad in enumerate(grads):
        through.grad = grad.clone()
        first.step()
        if number == 5:
            file = io.BytesIO()
            torch.save({"param": through.detach(), "optimizer": first.state_dict()}, file)
            file.seek(0)
            saved = torch.load(file, weights_only=True)
    with torch.no_grad():
        again.copy_(saved["param"])
    second.load_state_dict(saved["optimizer"])
    for grad in grads[6:]:
        again.grad = grad.clone()
        second.step()
    assert torch.equal(through, again)
    for key, value in first.state[through].items():
        assert torch.equal(value, second.state[again][key]), key
        assert value.dtype is second.state[again][key].dtype, key
        assert second.state[again][key].data_ptr() != saved["optimizer"]["state"][0][key].data_ptr(), key


OTHERWISE = [
    ({"use_kl_shampoo": True}, {}, "has left_eigenvalues, right_eigenvalues"),
    ({}, {"use_kl_shampoo": True}, "lacks left_eigenvalues, right_eigenvalues"),
    ({}, {"max_precond_dim": 6}, "has right_basis, right_factor"),
    ({"max_precond_dim": 0}, {}, "lacks left_basis, left_factor, right_basis, right_factor"),
]


def stepped(settings: dict[str, Any]) -> SOAP:
    """Return an optimizer of one matrix after a step."""
    param = parameter((6, 8))
    optimizer = SOAP([param], **SETTINGS, **settings)
    param.grad = gradients((6, 8), 1)[0]
    optimizer.step()
    return optimizer


@pytest.mark.parametrize(("there", "here", "told"), OTHERWISE, ids=[told for *_, told in OTHERWISE])
def test_state_of_other_settings_is_refused(there, here, told):
    """It would decide by what it holds, whatever is set here; the optimizer stays as it was."""
    saved, optimizer = stepped(there).state_dict(), stepped(here)
    (param,) = optimizer.state
    before = {key: value.clone() for key, value in optimizer.state[param].items()}
    with pytest.raises(CheckpointMismatchError, match=rf"shape \(6, 8\) was made by SOAP with other.*{told}"):
        optimizer.load_state_dict(saved)
    after = optimizer.state[param]
    assert after.keys() == before.keys()
    assert all(torch.equal(after[key], value) for key, value in before.items())


@pytest.mark.parametrize(
    "settings", [{"soap_use_kl_shampoo": False}, {"soap_max_precond_dim": 4}], ids=["kl", "dim"]
)
def test_no_step_goes_on_with_state_of_other_settings(settings):
    """A checkpoint may hold more than is kept here; no parameter has moved when a step tells."""
    pytest.importorskip("megaopt_adam")

    def model() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3))

    def step(stepping: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
        stepping(torch.ones(4, 6)).square().mean().backward()
        optimizer.step()

    first, again = model(), model()
    built = build_optimizer(first, "soap", lr=1e-2)
    step(first, built)
    other = build_optimizer(again, "soap", lr=1e-2, **settings)
    with pytest.raises(CheckpointMismatchError, match="other settings"):  # noqa: PT012 - at the latest in the step
        other.load_state_dict(built.state_dict())
        step(again, other)
    assert all(map(torch.equal, again[1].parameters(), model()[1].parameters()))


def test_a_copy_steps_as_the_original():
    """Its settings go with it."""
    optimizer = stepped({"use_kl_shampoo": True, "first_step": "initialize"})
    copied = copy.deepcopy(optimizer)
    (param,), (other,) = optimizer.state, copied.state
    for grad in gradients((6, 8), 3):
        param.grad, other.grad = grad.clone(), grad.clone()
        optimizer.step()
        copied.step()
    assert param is not other
    assert torch.equal(param, other)
