"""Adaptive Muon against its formulas in float64."""

import pytest
import torch
from megaopt_muon.adaptive import TensorParallelAdaptiveMuon
from megaopt_muon.coefficients import resolve_coefficients
from megaopt_muon.moments import get_supported_moment2_methods
from megaopt_muon.muon import init_state
from torch import nn

from megaopt_core.errors import ConfigurationError
from megaopt_core.params.roles import Role
from megaopt_core.params.specs import ParamInfo
from megaopt_core.params.views import MatrixView

QUINTIC = resolve_coefficients("quintic", 5)
LR, MU, WD, BETA2, EPS = 0.02, 0.9, 0.1, 0.8, 1e-8


def normalize64(method, o, v, g, u):
    """Return the normalized update and the new second moment."""
    if method == "adamuon":
        v = BETA2 * v + (1 - BETA2) * o.square()
        return o / (v.sqrt() + EPS), v
    if method == "normuon":
        mean = o.square().mean(dim=1 if o.shape[0] >= o.shape[1] else 0, keepdim=True)
        v = BETA2 * v + (1 - BETA2) * mean
        d = o / v.clamp_min(EPS).sqrt()
        return d * o.norm() / d.norm(), v
    v = BETA2 * v + (1 - BETA2) * g.square().sum()
    return o * u.norm() / (v.sqrt() + EPS), v


@pytest.mark.parametrize("shape", [(6, 10), (10, 6), (8, 8)])
@pytest.mark.parametrize("method", get_supported_moment2_methods())
def test_steps_follow_the_formula(formulas, method, shape):
    """Six steps give the float64 formula; the scale is applied once, after the second moment."""
    generator = torch.Generator().manual_seed(0)
    param = nn.Parameter(torch.randn(shape, generator=generator))
    optimizer = TensorParallelAdaptiveMuon(
        [param], LR, MU, True, WD, fp32_matmul_prec="highest", moment2_method=method, beta2=BETA2, eps=EPS
    )
    p, m, v = param.detach().double(), torch.zeros(shape, dtype=torch.float64), torch.tensor(0.0)
    for _ in range(6):
        param.grad = torch.randn(shape, generator=generator)
        g = param.grad.double()
        p = p * (1 - LR * WD)
        m = m + (1 - MU) * (g - m)
        u = g + MU * (m - g)
        d, v = normalize64(method, formulas.newton_schulz64(u, QUINTIC), v, g, u)
        p = p - LR * max(shape) ** 0.5 * d
        optimizer.step()
    torch.testing.assert_close(param.double(), p, rtol=0, atol=1e-5)


@pytest.mark.parametrize("method", get_supported_moment2_methods())
def test_experts_are_independent(method):
    """A batch of experts gives what each expert gives alone."""
    generator = torch.Generator().manual_seed(0)
    batch = nn.Parameter(torch.randn(3, 6, 10, generator=generator))
    batch.param_info = ParamInfo("w", Role.MATRIX, MatrixView(batch_dims=1, transposed=True))
    alone = [nn.Parameter(batch[index].detach().mT.clone()) for index in range(3)]
    together = TensorParallelAdaptiveMuon([batch], fp32_matmul_prec="highest", moment2_method=method)
    separate = TensorParallelAdaptiveMuon(alone, fp32_matmul_prec="highest", moment2_method=method)
    for _ in range(3):
        batch.grad = torch.randn(3, 6, 10, generator=generator)
        for index, param in enumerate(alone):
            param.grad = batch.grad[index].mT.clone()
        together.step()
        separate.step()
    for index, param in enumerate(alone):
        torch.testing.assert_close(batch[index].mT, param, rtol=0, atol=1e-6)


@pytest.mark.parametrize("method", get_supported_moment2_methods())
def test_fused_weights_scale_each_matrix_once(method):
    """A split weight gets the scale of each piece; zero gradients give a zero update."""
    param = nn.Parameter(torch.zeros(12, 10))
    param.param_info = ParamInfo("w", Role.MATRIX, MatrixView(split_sizes=(8, 4), label="gate_up"))
    optimizer = TensorParallelAdaptiveMuon([param], lr=1.0, moment2_method=method, scale_mode="unit_rms_norm")
    param.grad = torch.zeros(12, 10)
    optimizer.step()
    assert param.count_nonzero() == 0
    param.grad = torch.randn(12, 10, generator=torch.Generator().manual_seed(0))
    optimizer.step()
    assert param.isfinite().all()
    unscaled = nn.Parameter(torch.zeros(12, 10))
    unscaled.param_info = param.param_info
    plain = TensorParallelAdaptiveMuon([unscaled], lr=1.0, moment2_method=method, scale_mode="shape_scaling")
    for grad in (torch.zeros(12, 10), param.grad):
        unscaled.grad = grad
        plain.step()
    torch.testing.assert_close(param[:8], unscaled[:8] * 0.8**0.5)
    torch.testing.assert_close(param[8:], unscaled[8:] * 0.4**0.5)


def test_state_is_made_without_a_gradient():
    """init_state makes both moments; their shapes follow the method."""
    shapes = {"adamuon": (6, 10), "normuon": (1, 10), "namo": (1,)}
    for method in get_supported_moment2_methods():
        param = nn.Parameter(torch.randn(6, 10))
        optimizer = TensorParallelAdaptiveMuon([param], moment2_method=method)
        init_state(optimizer)
        assert optimizer.state[param]["moment2_buffer"].shape == shapes[method]
        assert optimizer.state[param]["momentum_buffer"].shape == (6, 10)


def test_closure():
    """The closure's loss is returned."""
    param = nn.Parameter(torch.randn(4, 8))

    def closure():
        param.grad = torch.randn(4, 8)
        return 3.0

    assert TensorParallelAdaptiveMuon([param]).step(closure) == 3.0


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"moment2_method": "rowmuon"}, "moment2_method='rowmuon'.*adamuon"),
        ({"beta2": 1.0}, "beta2=1.0"),
        ({"eps": 0.0}, "eps=0.0"),
        ({"moment2_method": "namo", "use_decoupled_weight_decay": False}, "use decoupled weight decay"),
    ],
)
def test_arguments_are_checked(kwargs, message):
    """Each bad argument is named, with what is allowed."""
    with pytest.raises(ConfigurationError, match=message):
        TensorParallelAdaptiveMuon([nn.Parameter(torch.ones(2, 2))], **kwargs)
