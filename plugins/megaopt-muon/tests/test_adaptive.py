"""Adaptive Muon against its formulas in float64."""

import pytest
import torch
from megaopt_muon.adaptive import TensorParallelAdaptiveMuon
from megaopt_muon.coefficients import resolve_coefficients
from megaopt_muon.moments import get_supported_moment2_methods
from megaopt_muon.muon import TensorParallelMuon, init_state
from torch import nn

from megaopt_core.errors import ConfigurationError
from megaopt_core.params import MatrixView, ParamInfo, Role

pytestmark = pytest.mark.any_python

QUINTIC = resolve_coefficients("quintic", 5)
LR, MU, WD, BETA2, EPS = 0.02, 0.9, 0.1, 0.8, 1e-8


def normalize64(
    method: str, o: torch.Tensor, v: torch.Tensor, g: torch.Tensor, u: torch.Tensor, beta2: float = BETA2
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the normalized update and the new second moment."""
    if method == "adamuon":
        v = beta2 * v + (1 - beta2) * o.square()
        return o / (v.sqrt() + EPS), v
    if method == "normuon":
        mean = o.square().mean(dim=1 if o.shape[0] >= o.shape[1] else 0, keepdim=True)
        v = beta2 * v + (1 - beta2) * mean
        d = o / v.clamp_min(EPS).sqrt()
        return d * o.norm() / d.norm(), v
    v = beta2 * v + (1 - beta2) * g.square().sum()
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


@pytest.mark.parametrize("method", [None, *get_supported_moment2_methods()])
def test_leading_dimensions_that_make_one_are_stepped_as_one(method):
    """`[heads, size, out]` becomes what `[heads * size, out]` becomes, to the bit; without a method plain Muon."""
    generator = torch.Generator().manual_seed(1)
    stored = torch.randn(4, 6, 10, generator=generator)
    params = [nn.Parameter(stored.clone()), nn.Parameter(stored.clone().flatten(0, 1))]
    for param, first_dims in zip(params, (2, 1), strict=True):
        param.param_info = ParamInfo("w", Role.MATRIX, MatrixView(transposed=True, first_dims=first_dims))
        if method is None:
            optimizer = TensorParallelMuon([param], LR, MU, True, WD)
        else:
            optimizer = TensorParallelAdaptiveMuon([param], LR, MU, True, WD, moment2_method=method)
        steps = torch.Generator().manual_seed(2)
        for _ in range(3):
            param.grad = torch.randn(24, 10, generator=steps).view(param.shape)
            optimizer.step()
    assert not torch.equal(params[0], stored)
    assert torch.equal(params[0].flatten(0, 1), params[1])


@pytest.mark.parametrize("size", [1e-25, 1e25])
@pytest.mark.parametrize("shape", [(6, 10), (3, 6, 10)])
def test_squares_of_norms_may_leave_the_range_of_float32(shape, size):
    """The second moment of namo holds them, and comes back from a state dict as it was: steps follow the formula."""
    generator = torch.Generator().manual_seed(0)
    params = [nn.Parameter(torch.zeros(shape)) for _ in range(2)]
    if len(shape) > 2:
        for param in params:
            param.param_info = ParamInfo("experts", Role.MATRIX, MatrixView(batch_dims=1))  # type: ignore[attr-defined]
    settings = {"lr": 1.0, "weight_decay": 0.0, "momentum": 0.0, "moment2_method": "namo", "eps": 1e-40}
    first, second = (TensorParallelAdaptiveMuon([param], **settings) for param in params)
    for param, optimizer in zip(params, (first, second), strict=True):
        param.grad = size * torch.randn(shape, generator=generator.manual_seed(1))
        optimizer.step()
        assert param.isfinite().all()
        o = optimizer.newton_schulz(param.grad) * 10**0.5
        torch.testing.assert_close(param, -o / (1 - 0.95) ** 0.5, rtol=1e-5, atol=1e-5)
    second.load_state_dict(first.state_dict())
    assert torch.equal(first.state[params[0]]["moment2_buffer"], second.state[params[1]]["moment2_buffer"])


@pytest.mark.parametrize("eps", [1e-8, 1e-20])
@pytest.mark.parametrize("method", get_supported_moment2_methods())
def test_what_eps_does_to_small_gradients(method, eps):
    """Gradients that clipping has made small step as any others do, but for namo with an epsilon no smaller."""
    params = [nn.Parameter(torch.zeros(16, 24)) for _ in range(2)]
    for param, size in zip(params, (1.0, 1e-11), strict=True):
        optimizer = TensorParallelAdaptiveMuon(
            [param], lr=1.0, weight_decay=0.0, moment2_method=method, eps=eps
        )
        param.grad = size * torch.randn(16, 24, generator=torch.Generator().manual_seed(0))
        optimizer.step()
    ratio = (params[1].norm() / params[0].norm()).item()
    assert ratio < 0.01 if (method, eps) == ("namo", 1e-8) else abs(ratio - 1.0) < 0.01


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


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("method", get_supported_moment2_methods())
def test_zero_momentum_is_a_zero_update(method, dtype):
    """In every dtype, in the first step and later."""
    for shape in ((8, 16), (16, 8)):
        param = nn.Parameter(torch.ones(shape, dtype=dtype))
        optimizer = TensorParallelAdaptiveMuon([param], lr=0.1, weight_decay=0.0, moment2_method=method)
        for _ in range(2):
            param.grad = torch.zeros(shape, dtype=dtype)
            optimizer.step()
        assert (param == 1).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("method", get_supported_moment2_methods())
def test_narrow_parameters_go_the_way_of_wide_ones(method, dtype):
    """The second moment is in float32: a narrow parameter moves as a float32 one does, to its rounding."""
    # The square of the gradient's norm is no number of float16.
    generator = torch.Generator().manual_seed(0)
    narrow, wide = (nn.Parameter(torch.zeros(8, 16, dtype=kind)) for kind in (dtype, torch.float32))
    settings = {"lr": 0.1, "momentum": 0.0, "weight_decay": 0.0, "fp32_matmul_prec": "highest", "eps": 1e-2}
    optimizers = [
        TensorParallelAdaptiveMuon([param], **settings, moment2_method=method) for param in (narrow, wide)
    ]
    for _ in range(3):
        narrow.grad = (200 * torch.randn(8, 16, generator=generator)).to(dtype)
        wide.grad = narrow.grad.float()
        for optimizer in optimizers:
            optimizer.step()
    rounding = 8 * torch.finfo(dtype).eps
    moments = [
        optimizer.state[param]["moment2_buffer"]
        for optimizer, param in zip(optimizers, (narrow, wide), strict=True)
    ]
    torch.testing.assert_close(*moments, rtol=rounding, atol=rounding * moments[1].abs().max().item())
    torch.testing.assert_close(narrow.float(), wide, rtol=0, atol=rounding * wide.abs().max().item())


def test_loading_keeps_the_second_moment_in_float32():
    """A narrow parameter's second moment comes back with the bits that were saved, in memory of its own."""
    params = [nn.Parameter(torch.ones(4, 8, dtype=torch.float16)) for _ in range(2)]
    first, second = (TensorParallelAdaptiveMuon([param]) for param in params)
    params[0].grad = torch.randn(4, 8, generator=torch.Generator().manual_seed(0)).half()
    first.step()
    saved = first.state[params[0]]["moment2_buffer"]
    second.load_state_dict(first.state_dict())
    loaded = second.state[params[1]]["moment2_buffer"]
    assert loaded.dtype is torch.float32
    assert torch.equal(loaded, saved)
    assert loaded.data_ptr() != saved.data_ptr()


@pytest.mark.parametrize("method", get_supported_moment2_methods())
def test_a_subclass_may_orthogonalize_itself(method):
    """What a subclass's `orthogonalize` returns is normalized, scaled and applied, and is not changed."""
    direction, seen = torch.eye(4, 8), []

    class Own(TensorParallelAdaptiveMuon):
        def orthogonalize(self, p, grad, **kwargs):
            seen.append((p.shape, grad.clone(), kwargs["momentum"]))
            return direction

    param = nn.Parameter(torch.zeros(4, 8))
    param.grad = torch.ones(4, 8)
    Own([param], lr=1.0, weight_decay=0.0, beta2=0.0, moment2_method=method).step()
    assert [(shape, momentum) for shape, _, momentum in seen] == [((4, 8), 0.95)]
    assert torch.equal(direction, torch.eye(4, 8))
    d, _ = normalize64(method, direction.double(), 0.0, param.grad.double(), seen[0][1].double(), 0.0)
    torch.testing.assert_close(param.double(), -(8**0.5) * d, rtol=1e-5, atol=1e-6)


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
