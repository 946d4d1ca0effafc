"""Muon against its formula in float64."""

import copy
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from emerging_optimizers.orthogonalized_optimizers import Muon as OrthogonalizedMuon
from megaopt_muon.adaptive import TensorParallelAdaptiveMuon
from megaopt_muon.coefficients import resolve_coefficients
from megaopt_muon.muon import TensorParallelMuon, init_state
from megaopt_muon.products import workspace
from torch import nn

from megaopt_core import build_optimizer
from megaopt_core.errors import ConfigurationError, GradientError, ViewError
from megaopt_core.params import MatrixView, ParamInfo, Role

pytestmark = pytest.mark.any_python

QUINTIC = resolve_coefficients("quintic", 5)
SHAPES = [(6, 10), (10, 6), (8, 8), (6, 10)]


def parameters(shapes: Iterable[tuple[int, ...]], seed: int = 0) -> list[nn.Parameter]:
    """Return random parameters."""
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]


def set_gradients(params: Iterable[nn.Parameter], seed: int) -> None:
    """Give every parameter a random gradient."""
    generator = torch.Generator().manual_seed(seed)
    for param in params:
        param.grad = torch.randn(param.shape, generator=generator)


class Reference64:
    """Muon in float64, one matrix at a time, as its formula is written."""

    def __init__(
        self,
        formulas: SimpleNamespace,
        params: Iterable[torch.Tensor],
        scale: Callable[[int, int], float],
        lr: float = 0.02,
        momentum: float = 0.95,
        nesterov: bool = True,
        wd: float = 0.1,
        decoupled: bool = True,
    ) -> None:
        self.formulas, self.scale, self.lr, self.mu = formulas, scale, lr, momentum
        self.nesterov, self.wd, self.decoupled = nesterov, wd, decoupled
        self.params = [param.detach().double().clone() for param in params]
        self.momenta = [torch.zeros_like(param) for param in self.params]

    def step(self, grads: Iterable[torch.Tensor]) -> None:
        for index, grad in enumerate(grads):
            p, m, g = self.params[index], self.momenta[index], grad.double()
            if self.decoupled:
                p.mul_(1 - self.lr * self.wd)
            else:
                g = g + self.wd * p
            m.add_((1 - self.mu) * (g - m))
            u = g + self.mu * (m - g) if self.nesterov else m
            p.sub_(self.lr * self.scale(*p.shape) * self.formulas.newton_schulz64(u, QUINTIC))


@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize("nesterov", [True, False])
def test_steps_follow_the_formula(formulas, nesterov, decoupled):
    """Ten steps with either momentum and either weight decay give the float64 formula."""
    params = parameters(SHAPES)
    reference = Reference64(
        formulas, params, lambda r, c: max(r, c) ** 0.5, nesterov=nesterov, decoupled=decoupled
    )
    optimizer = TensorParallelMuon(params, 0.02, 0.95, nesterov, 0.1, decoupled, fp32_matmul_prec="highest")
    for step in range(10):
        set_gradients(params, step)
        before = [param.grad.clone() for param in params]
        reference.step(before)
        optimizer.step()
        assert all(torch.equal(param.grad, grad) for param, grad in zip(params, before, strict=True))
    for param, exact in zip(params, reference.params, strict=True):
        torch.testing.assert_close(param.double(), exact, rtol=0, atol=2e-6)


@pytest.mark.parametrize(
    ("mode", "scale"),
    [
        ("spectral", lambda r, c: max(r, c) ** 0.5),
        ("unit_rms_norm", lambda r, c: (r / c) ** 0.5),
        ("shape_scaling", lambda r, c: max(1, r / c) ** 0.5),
    ],
)
def test_scale_modes(formulas, mode, scale):
    """Each scale mode is its formula, times the extra factor."""
    params = parameters(SHAPES)
    reference = Reference64(formulas, params, lambda r, c: 0.2 * scale(r, c))
    optimizer = TensorParallelMuon(
        params, 0.02, weight_decay=0.1, fp32_matmul_prec="highest", scale_mode=mode, extra_scale_factor=0.2
    )
    set_gradients(params, 0)
    reference.step([param.grad for param in params])
    optimizer.step()
    for param, exact in zip(params, reference.params, strict=True):
        torch.testing.assert_close(param.double(), exact, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("dtype", "least", "most"),
    [("in_bfloat16", 1e-5, 2e-2), ("in_float32", 0.0, 1e-5)],
    ids=str,
)
def test_medium_is_the_formula_in_bfloat16_or_closer(request, formulas, dtype, least, most):
    """Precision medium computes the iteration in bfloat16: close, not equal; or in float32, which is closer."""
    request.getfixturevalue(dtype)
    (param,) = parameters([(32, 64)])
    exact = param.detach().double().clone()
    optimizer = TensorParallelMuon([param], 0.1, weight_decay=0.0)
    set_gradients([param], 0)
    exact -= 0.1 * 8 * formulas.newton_schulz64(param.grad, QUINTIC)
    optimizer.step()
    assert least < (param - exact).abs().max() < most


VIEWS = {
    "plain": (MatrixView(), (6, 10)),
    "transposed": (MatrixView(transposed=True), (6, 10)),
    "grouped qkv": (MatrixView(split_sizes=(4, 2, 2), fused="qkv"), (16, 10)),
    "gate_up": (MatrixView(split_sizes=(8, 8), label="gate_up"), (16, 10)),
    "interleaved": (MatrixView(split_sizes=(1, 1), label="gate_up"), (16, 10)),
    "experts": (MatrixView(batch_dims=1), (3, 6, 10)),
    "experts stored [in, out]": (MatrixView(batch_dims=1, transposed=True, split_sizes=(4, 4)), (3, 10, 8)),
    "convolution": (MatrixView(), (6, 3, 2, 2)),
}


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("name", VIEWS)
def test_views_orthogonalize_every_matrix_by_itself(monkeypatch, formulas, name, apart):
    """Each matrix of a view is orthogonalized and scaled by itself, and lands where it was."""
    if apart:  # as the workspace keeps rows of whole KiB
        monkeypatch.setattr(workspace, "_SAME_CACHE_SET", 4)
        monkeypatch.setattr(workspace, "_SMALLEST", 1)
    view, shape = VIEWS[name]
    (param,) = parameters([shape])
    param.param_info = ParamInfo("w", Role.MATRIX, view)
    set_gradients([param], 1)
    expected = []
    for matrix in view.matrices(param.grad.double()):
        rows, columns = matrix.shape[-2:]
        expected.append(formulas.newton_schulz64(matrix, QUINTIC) * (rows / columns) ** 0.5)
    exact = param.detach().double() - 0.1 * view.merge(expected, shape)
    optimizer = TensorParallelMuon(
        [param],
        0.1,
        weight_decay=0.0,
        split_qkv=True,
        fp32_matmul_prec="highest",
        scale_mode="unit_rms_norm",
    )
    update = optimizer.orthogonalize(param, param.grad)
    optimizer.step()
    torch.testing.assert_close(param.double(), exact, rtol=0, atol=1e-6)
    torch.testing.assert_close(update.double(), view.merge(expected, shape), rtol=0, atol=1e-5)


def test_split_qkv_false_leaves_a_fused_weight_whole():
    """Without split_qkv a fused query-key-value weight is one matrix; other fused weights are split all the same."""
    (qkv, whole) = parameters([(16, 10), (16, 10)])
    qkv.param_info = ParamInfo("w", Role.MATRIX, MatrixView(split_sizes=(8, 4, 4), fused="qkv"))
    optimizer = TensorParallelMuon([qkv, whole])
    grad = torch.randn(16, 10)
    assert torch.equal(optimizer.orthogonalize(qkv, grad), optimizer.orthogonalize(whole, grad))


class Attention(nn.Module):
    """Nothing but its forward says what the projection is made of."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(16, 48, bias=False)
        self.out = nn.Linear(16, 9, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.proj(x).chunk(3, dim=-1)
        return self.out(torch.nn.functional.scaled_dot_product_attention(q, k, v))


@pytest.mark.parametrize("split", [True, False])
def test_split_qkv_is_honoured_for_weights_that_are_found_by_reading(formulas, split):
    """A fused weight that only the forward shows is split, or left whole, as the setting says."""
    model = Attention()
    optimizer = build_optimizer(
        model,
        "muon",
        lr=0.1,
        weight_decay=0.0,
        muon_split_qkv=split,
        muon_fp32_matmul_prec="highest",
        example=torch.ones(2, 5, 16),
    )
    before = model.proj.weight.detach().double().clone()
    grad = torch.randn(48, 16, generator=torch.Generator().manual_seed(5))
    model.proj.weight.grad = grad.clone()
    optimizer.step()
    parts = grad.mul(0.05).chunk(3) if split else [grad.mul(0.05)]
    moved = torch.cat([formulas.newton_schulz64(p, QUINTIC) * max(p.shape) ** 0.5 for p in parts])
    torch.testing.assert_close(model.proj.weight.double(), before - 0.1 * moved, rtol=0, atol=1e-5)


@pytest.mark.parametrize("precision", ["medium", "highest"])
def test_an_exploding_layer_does_not_freeze_the_others(precision):
    """What is clipped to a norm of 1e-9, beside a layer with huge gradients, still moves as far as alone."""
    (small,), (large,) = parameters([(32, 48)]), parameters([(32, 48)])
    large.data.copy_(small)
    grad = torch.randn(32, 48, generator=torch.Generator().manual_seed(4))
    for param, scale in ((small, 1e-9), (large, 1.0)):
        param.grad = grad * scale
        TensorParallelMuon([param], 0.1, weight_decay=0.0, fp32_matmul_prec=precision).step()
    torch.testing.assert_close(small, large, rtol=0, atol=1e-2 if precision == "medium" else 1e-5)


def test_standalone_qkv_description(formulas):
    """Without param_info, is_qkv_fn and qkv_split_shapes split per query group."""
    (param,) = parameters([(16, 10)])
    optimizer = TensorParallelMuon(
        [param],
        split_qkv=True,
        is_qkv_fn=lambda p: p.shape[0] == 16,
        qkv_split_shapes=(4, 2, 2),
        fp32_matmul_prec="highest",
    )
    grad = torch.randn(16, 10, generator=torch.Generator().manual_seed(0))
    q = grad.view(2, 8, 10)[:, :4].reshape(8, 10)
    result = optimizer.orthogonalize(param, grad).view(2, 8, 10)[:, :4].reshape(8, 10)
    torch.testing.assert_close(
        result.double(), formulas.newton_schulz64(q, QUINTIC) * 10**0.5, rtol=0, atol=1e-5
    )


@pytest.mark.parametrize("dtype", ["in_bfloat16", "in_float32"])
def test_a_batch_does_not_change_a_matrix(request, dtype):
    """What a matrix becomes depends bit for bit on itself alone, not on its neighbours in a batch."""
    request.getfixturevalue(dtype)
    for precision in ("medium", "highest"):
        for shape in ((16, 16), (12, 40), (64, 64)):
            together, alone = parameters([shape] * 5), parameters([shape] * 5)
            for params in (together, alone):
                set_gradients(params, 0)
            TensorParallelMuon(together, fp32_matmul_prec=precision).step()
            for param in alone:
                TensorParallelMuon([param], fp32_matmul_prec=precision).step()
            assert all(torch.equal(a, b) for a, b in zip(together, alone, strict=True)), (precision, shape)


def test_nan_and_zero_stay_with_their_parameter():
    """A NaN gradient ruins its own parameter only; a zero gradient moves nothing."""
    params, clean = parameters([(8, 16)] * 3), parameters([(8, 16)] * 3)
    for some in (params, clean):
        set_gradients(some, 0)
    params[1].grad[0, 0] = float("nan")
    params[2].grad.zero_()
    before = params[2].clone()
    TensorParallelMuon(params, weight_decay=0.0).step()
    TensorParallelMuon(clean, weight_decay=0.0).step()
    assert torch.equal(params[0], clean[0])
    assert params[1].isnan().all()
    assert torch.equal(params[2], before)


@pytest.mark.parametrize("cls", [TensorParallelMuon, TensorParallelAdaptiveMuon])
def test_parameters_without_elements_are_skipped(cls):
    """An empty matrix is nothing to update; the others are."""
    params = parameters([(0, 5), (5, 0), (4, 8)])
    set_gradients(params, 0)
    before = params[2].clone()
    optimizer = cls(params, scale_mode="unit_rms_norm")
    init_state(optimizer)
    optimizer.step()
    assert not torch.equal(params[2], before)


def test_parameters_without_gradient_are_skipped():
    """A parameter whose grad is None stays, and gets no state."""
    params = parameters([(4, 8), (4, 8)])
    params[0].grad = torch.randn(4, 8)
    before = params[1].clone()
    optimizer = TensorParallelMuon(params)
    optimizer.step()
    assert torch.equal(params[1], before)
    assert params[1] not in optimizer.state


def test_closure_runs_once_with_gradients():
    """The closure is called once, gradients enabled, before gradients are read."""
    (param,) = parameters([(4, 8)])
    calls = []

    def closure():
        calls.append(torch.is_grad_enabled())
        param.grad = None
        loss = param.square().sum()
        loss.backward()
        return loss

    loss = TensorParallelMuon([param]).step(closure)
    assert calls == [True]
    assert loss > 0


def test_tensor_learning_rate():
    """A learning rate in a tensor gives what the number gives."""
    number, tensor = parameters([(4, 8)] * 2, 1), parameters([(4, 8)] * 2, 1)
    for params, lr in ((number, 0.25), (tensor, torch.tensor(0.25))):
        set_gradients(params, 0)
        TensorParallelMuon(params, lr).step()
    for a, b in zip(number, tensor, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_parameter_dtypes(dtype):
    """Parameters in bfloat16 or float64 are stepped in their own dtype."""
    param = nn.Parameter(torch.randn(8, 12, dtype=dtype))
    param.grad = torch.randn(8, 12, dtype=dtype)
    before = param.detach().clone()
    optimizer = TensorParallelMuon([param], lr=0.1, fp32_matmul_prec="highest")
    optimizer.step()
    assert param.dtype is dtype
    assert optimizer.state[param]["momentum_buffer"].dtype is dtype
    assert not torch.equal(param, before)


def test_init_state_needs_no_gradient_and_moves_nothing():
    """State exists for every parameter, and the next step is the same as without."""
    made, fresh = parameters(SHAPES), parameters(SHAPES)
    with_state, without = TensorParallelMuon(made), TensorParallelMuon(fresh)
    init_state(with_state)
    assert all(with_state.state[param]["momentum_buffer"].count_nonzero() == 0 for param in made)
    assert all(torch.equal(a, b) for a, b in zip(made, fresh, strict=True))
    for params, optimizer in ((made, with_state), (fresh, without)):
        set_gradients(params, 0)
        optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(made, fresh, strict=True))


def test_resume_is_bit_exact():
    """Five steps, a state dict, five more: as ten."""
    straight, first = parameters(SHAPES), parameters(SHAPES)
    optimizer = TensorParallelMuon(straight)
    before = TensorParallelMuon(first)
    for step in range(10):
        set_gradients(straight, step)
        optimizer.step()
        if step == 5:
            resumed = TensorParallelMuon(first)
            resumed.load_state_dict(copy.deepcopy(before.state_dict()))
            before = resumed
        set_gradients(first, step)
        before.step()
    assert all(torch.equal(a, b) for a, b in zip(straight, first, strict=True))


def test_custom_coefficients(formulas):
    """Coefficients given by the user are iterated."""
    (param,) = parameters([(6, 10)])
    custom = [(2.0, -1.5, 0.5), (1.875, -1.25, 0.375)]
    optimizer = TensorParallelMuon(
        [param], fp32_matmul_prec="highest", coefficient_type="custom", num_ns_steps=3, coefficients=custom
    )
    exact = formulas.newton_schulz64(param.detach(), [*custom, custom[0]]) * 10**0.5
    torch.testing.assert_close(
        optimizer.orthogonalize(param, param.detach()).double(), exact, rtol=0, atol=1e-5
    )


class Halved(TensorParallelMuon):
    """A subclass that replaces what is done per parameter."""

    def orthogonalize(self, p: torch.Tensor, grad: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        assert "momentum" in kwargs
        return super().orthogonalize(p, grad, **kwargs) / 2

    def post_weight_update_fn_inplace(self, p: torch.Tensor) -> None:
        p.mul_(0.0)


def test_subclass_hooks_are_called():
    """Orthogonalize and the hooks around the update keep working in subclasses."""
    (param,) = parameters([(4, 8)])
    set_gradients([param], 0)
    Halved([param]).step()
    assert param.count_nonzero() == 0


def test_several_groups_have_their_own_settings():
    """Learning rate, momentum and weight decay are read per group, at every step."""
    a, b = parameters([(4, 8), (4, 8)])
    b.data.copy_(a.data)
    a.grad = b.grad = torch.randn(4, 8)
    optimizer = TensorParallelMuon([{"params": [a]}, {"params": [b], "lr": 0.0}], lr=0.1)
    before = b.clone()
    optimizer.step()
    assert torch.equal(b, before)
    assert not torch.equal(a, before)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"lr": -1.0}, "lr=-1.0: must be a number of at least 0"),
        ({"momentum": 1.0}, "momentum=1.0: must be a number in"),
        ({"weight_decay": -0.1}, "weight_decay=-0.1"),
        ({"fp32_matmul_prec": "low"}, "fp32_matmul_prec='low'.*highest"),
        ({"tp_mode": "sharded"}, "tp_mode='sharded'.*blockwise"),
        ({"ns_method": "fast"}, "ns_method='fast'.*auto"),
        ({"scale_mode": "none"}, "scale_mode='none'.*spectral"),
        ({"coefficient_type": "septic"}, "coefficient_type='septic'.*quintic"),
        ({"num_ns_steps": 0}, "num_ns_steps=0"),
        ({"num_ns_steps": 10**9}, "num_ns_steps=1000000000: must be an integer from 1 to 100"),
        ({"norm_eps": 0.0}, "norm_eps=0.0: must be a number above 0"),
        ({"extra_scale_factor": -1.0}, "extra_scale_factor=-1.0"),
        ({"extra_scale_factor": float("nan")}, "extra_scale_factor=nan"),
        ({"extra_scale_factor": float("inf")}, "extra_scale_factor=inf"),
    ],
)
def test_arguments_are_checked(kwargs, message):
    """Each bad argument is named, with what is allowed."""
    with pytest.raises(ConfigurationError, match=message):
        TensorParallelMuon(parameters([(4, 8)]), **kwargs)


def test_what_is_no_matrix_is_refused():
    """A vector, and a fused weight without sizes, are errors that name the parameter."""
    vector = nn.Parameter(torch.ones(4))
    vector.grad = torch.ones(4)
    with pytest.raises(ViewError, match=r"shape \(4,\) is not a matrix"):
        TensorParallelMuon([vector]).step()
    (fused,) = parameters([(6, 4)])
    set_gradients([fused], 0)
    with pytest.raises(ViewError, match="qkv_split_shapes is not given"):
        TensorParallelMuon([fused], split_qkv=True, is_qkv_fn=lambda _: True).step()


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
def test_sparse_gradients_are_refused():
    """A sparse gradient is an error that says so."""
    (param,) = parameters([(4, 8)])
    param.grad = torch.eye(4, 8).to_sparse()
    with pytest.raises(GradientError, match="sparse"):
        TensorParallelMuon([param]).step()


@pytest.mark.parametrize("cls", [TensorParallelMuon, TensorParallelAdaptiveMuon])
def test_a_misspelled_argument_is_refused(cls):
    """What is no argument does not become a setting of the groups that nobody reads."""
    with pytest.raises(TypeError, match="weight_dcay"):
        cls([torch.nn.Parameter(torch.zeros(2, 2))], weight_dcay=0.5)


@pytest.mark.parametrize("saved_of", ["torch.optim", "emerging_optimizers", "muon"])
@pytest.mark.parametrize("cls", [TensorParallelMuon, TensorParallelAdaptiveMuon])
def test_state_of_another_muon_is_taken(cls, saved_of):
    """Keys of groups, and states, that it lacks are those of a new optimizer; its momentum and its settings hold."""
    others = {
        "torch.optim": lambda params: torch.optim.Muon(params, lr=0.5, momentum=0.25),
        "emerging_optimizers": lambda params: OrthogonalizedMuon(
            params, lr=0.5, momentum=0.25, weight_decay=0.0, nesterov=False
        ),
        "muon": lambda params: TensorParallelMuon(params, lr=0.5, momentum=0.25),
    }
    params = parameters([(4, 8), (4, 8)])
    set_gradients(params, 0)
    other, optimizer = others[saved_of](params[:1]), cls(params[1:])
    other.step()
    optimizer.load_state_dict(other.state_dict())
    (group,) = optimizer.param_groups
    assert (group["lr"], group["momentum"], group["cautious_weight_decay"]) == (0.5, 0.25, False)
    momentum = optimizer.state[params[1]]["momentum_buffer"].clone()
    assert torch.equal(momentum, other.state[params[0]]["momentum_buffer"])
    before = params[1].detach().clone()
    optimizer.step()
    torch.testing.assert_close(
        optimizer.state[params[1]]["momentum_buffer"], momentum.lerp(params[1].grad, 0.75)
    )
    assert (params[1] != before).any()
