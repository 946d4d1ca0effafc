"""SOAP against its formulas in float64, against torch's AdamW and against emerging-optimizers' class."""

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from emerging_optimizers import soap as emerging_soap
from megaopt_soap.soap import SOAP, init_state
from torch import nn

from megaopt_core.errors import ConfigurationError, GradientError

pytestmark = pytest.mark.any_python

NUMBERS = {"lr": 0.02, "betas": (0.9, 0.95), "shampoo_beta": 0.9, "eps": 1e-6, "weight_decay": 0.1}
SHAPES = [(6, 10), (10, 6), (8, 8)]


def gradients(
    shape: tuple[int, ...], count: int, seed: int = 0, dtype: torch.dtype = torch.float64
) -> list[torch.Tensor]:
    """Return Gaussian gradients that the seed alone decides."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(dtype) for _ in range(count)]


def make(
    shape: tuple[int, ...], dtype: torch.dtype = torch.float64, seed: int = 1, **settings: Any
) -> tuple[nn.Parameter, SOAP]:
    """Return a parameter and its optimizer."""
    param = nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype))
    return param, SOAP([param], **{**NUMBERS, **settings})


def run(param: torch.Tensor, optimizer: torch.optim.Optimizer, grads: Iterable[torch.Tensor]) -> None:
    """Step once with each gradient."""
    for grad in grads:
        param.grad = grad.clone()
        optimizer.step()


@pytest.mark.parametrize("frequency", [1, 3])
@pytest.mark.parametrize("kl", [False, True])
def test_steps_follow_the_formula(soap64, kl, frequency):
    """From the first step on, in float64."""
    param, optimizer = make((8, 8), use_kl_shampoo=kl, precondition_frequency=frequency)
    reference = soap64.Reference(param, kl=kl, **NUMBERS)
    for grad in gradients((8, 8), 8):
        run(param, optimizer, [grad])
        reference.step(grad, frequency=frequency)
    torch.testing.assert_close(param.detach(), reference.value, rtol=0, atol=1e-7)


@pytest.mark.parametrize("frequency", [1, 3])
@pytest.mark.parametrize("kl", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_steps_follow_the_formula_from_factors_of_full_rank(soap64, shape, kl, frequency):
    """Of any shape."""
    # A first gradient that is not square leaves a null space, of which any basis is as good.
    param, optimizer = make(shape, use_kl_shampoo=kl, precondition_frequency=frequency)
    reference = soap64.Reference(param, kl=kl, **NUMBERS)
    reference.begin_at(5, torch.Generator().manual_seed(3))
    init_state(optimizer)
    soap64.give_state(optimizer.state[param], reference)
    for grad in gradients(shape, 8):
        run(param, optimizer, [grad])
        reference.step(grad, frequency=frequency)
    torch.testing.assert_close(param.detach(), reference.value, rtol=0, atol=1e-11)


@pytest.mark.parametrize("kl", [False, True])
@pytest.mark.parametrize("shape", [(600, 40), (40, 600)])
def test_products_and_decompositions_by_blocks_follow_the_formula(soap64, shape, kl):
    """Of matrices that are large enough for them."""
    param, optimizer = make(shape, use_kl_shampoo=kl, precondition_frequency=2)
    reference = soap64.Reference(param, kl=kl, **NUMBERS)
    reference.begin_at(6, torch.Generator().manual_seed(3))
    init_state(optimizer)
    soap64.give_state(optimizer.state[param], reference)
    for grad in gradients(shape, 3):
        run(param, optimizer, [grad])
        reference.step(grad, frequency=2)
    torch.testing.assert_close(param.detach(), reference.value, rtol=0, atol=1e-9)


@pytest.mark.parametrize("kl", [False, True])
def test_a_frequency_may_change_on_the_way(soap64, kl):
    """Momentum is found again in whichever basis it was kept."""
    param, optimizer = make((8, 8), use_kl_shampoo=kl)
    reference = soap64.Reference(param, kl=kl, **NUMBERS)
    reference.begin_at(5, torch.Generator().manual_seed(3))
    init_state(optimizer)
    soap64.give_state(optimizer.state[param], reference)
    for grad, frequency in zip(gradients((8, 8), 8), (1, 4, 4, 1, 1, 3, 3, 5), strict=True):
        optimizer.param_groups[0]["precondition_frequency"] = frequency
        run(param, optimizer, [grad])
        reference.step(grad, frequency=frequency)
    torch.testing.assert_close(param.detach(), reference.value, rtol=0, atol=1e-11)


@pytest.mark.parametrize("kl", [False, True])
@pytest.mark.parametrize("frequency", [1, 3])
def test_a_first_step_that_initializes_moves_nothing(soap64, kl, frequency):
    """The first gradient goes into the factors as without KL-Shampoo; Adam begins with the second."""
    settings = {"use_kl_shampoo": kl, "precondition_frequency": frequency, "first_step": "initialize"}
    param, optimizer = make((8, 8), **settings)
    before = param.detach().clone()
    reference = soap64.Reference(param, kl=kl, **NUMBERS)
    for number, grad in enumerate(gradients((8, 8), 8)):
        run(param, optimizer, [grad])
        reference.step(grad, frequency=frequency, initialize=True)
        assert torch.equal(param.detach(), before) is (number == 0)
    torch.testing.assert_close(param.detach(), reference.value, rtol=0, atol=1e-9)


def test_an_initializing_first_step_takes_away_the_leap_of_the_second():
    """In its own bases the first gradient is diagonal, and the second step divides by what was nothing there."""
    largest = {}
    for first_step in ("update", "initialize"):
        param, optimizer = make((40, 60), torch.float32, weight_decay=0.0, first_step=first_step)
        moved = []
        for grad in gradients((40, 60), 5, dtype=torch.float32):
            before = param.detach().clone()
            run(param, optimizer, [grad])
            moved.append((param.detach() - before).square().mean().sqrt().item() / NUMBERS["lr"])
        largest[first_step] = max(moved)
    assert largest["initialize"] < 1.5
    assert largest["update"] > 5


@pytest.mark.parametrize(("cap", "sides"), [(6, (True, False)), (7, (True, False))])
def test_a_large_dimension_has_no_basis(soap64, cap, sides):
    """One side alone is rotated; KL-Shampoo has no other factor to weigh with then."""
    param, optimizer = make((6, 10), use_kl_shampoo=True, max_precond_dim=cap, precondition_frequency=2)
    reference = soap64.Reference(param, kl=True, sides=sides, **NUMBERS)
    for grad in gradients((6, 10), 6):
        run(param, optimizer, [grad])
        reference.step(grad, frequency=2)
    assert {"left_basis"} == {key for key in optimizer.state[param] if key.endswith("basis")}
    torch.testing.assert_close(param.detach(), reference.value, rtol=0, atol=1e-9)


@pytest.mark.parametrize("shape", [(6, 10), (12,), ()])
def test_without_bases_it_is_adamw(shape):
    """Where both dimensions are too large, and for what is no matrix."""
    numbers = {key: value for key, value in NUMBERS.items() if key != "shampoo_beta"}
    param, optimizer = make(shape, max_precond_dim=5)
    other = nn.Parameter(param.detach().clone())
    adamw = torch.optim.AdamW([other], **numbers)
    for grad in gradients(shape, 5):
        run(param, optimizer, [grad])
        run(other, adamw, [grad])
    assert not [key for key in optimizer.state[param] if key.endswith("basis")]
    torch.testing.assert_close(param, other, rtol=0, atol=1e-12)


@pytest.mark.parametrize("kl", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_steps_equal_those_of_emerging_optimizers(soap64, shape, kl):
    """From the same state with factors of full rank, to float32."""
    param, optimizer = make(shape, torch.float32, use_kl_shampoo=kl)
    other = nn.Parameter(param.detach().clone())
    emerging = emerging_soap.SOAP([other], **NUMBERS, use_kl_shampoo=kl)
    reference = soap64.Reference(param, kl=kl, **NUMBERS)
    reference.begin_at(5, torch.Generator().manual_seed(3))
    init_state(optimizer)
    soap64.give_state(optimizer.state[param], reference)
    emerging._init_group(emerging.param_groups[0], skip_non_grad_params=False)
    state = emerging.state[other]
    state["step"] = reference.step_number
    for key, value in (("exp_avg", reference.m), ("exp_avg_sq", reference.v)):
        state[key].copy_(value)
    for side, letter in enumerate("LR"):
        state[letter].copy_(reference.factors[side])
        state[f"Q_{letter}"].copy_(reference.bases[side])
    with torch.compiler.set_stance("force_eager"):
        for grad in gradients(shape, 6, dtype=torch.float32):
            run(param, optimizer, [grad])
            run(other, emerging, [grad])
    torch.testing.assert_close(param, other, rtol=0, atol=1e-3 * NUMBERS["lr"])


@pytest.mark.parametrize("kl", [False, True])
def test_first_steps_equal_those_of_emerging_optimizers(kl):
    """With an eps that hides the rounding of what is zero in the first step."""
    settings = {"eps": 1e-2, "weight_decay": 0.0}
    param, optimizer = make((16, 16), torch.float32, use_kl_shampoo=kl, **settings)
    other = nn.Parameter(param.detach().clone())
    emerging = emerging_soap.SOAP([other], **{**NUMBERS, **settings}, use_kl_shampoo=kl)
    with torch.compiler.set_stance("force_eager"):
        for grad in gradients((16, 16), 5, dtype=torch.float32):
            run(param, optimizer, [grad])
            run(other, emerging, [grad])
    torch.testing.assert_close(param, other, rtol=0, atol=1e-2 * NUMBERS["lr"])


@pytest.mark.parametrize("kl", [False, True])
def test_updates_are_orthogonalized(soap64, kl):
    """SOAP-Muon: Muon's iteration on the rotated-back update, scaled by the root of the larger dimension."""
    from emerging_optimizers.orthogonalized_optimizers.muon_utils import newton_schulz

    param, optimizer = make((6, 10), use_kl_shampoo=kl, orthogonalize=True, extra_scale_factor=0.3)
    reference = soap64.Reference(param, kl=kl, **NUMBERS)
    reference.begin_at(5, torch.Generator().manual_seed(3))
    init_state(optimizer)
    soap64.give_state(optimizer.state[param], reference)
    for grad in gradients((6, 10), 4):
        run(param, optimizer, [grad])
        reference.step(
            grad,
            transform=lambda update: 0.3 * 10**0.5 * newton_schulz(update.float(), 5, "quintic").double(),
        )
    torch.testing.assert_close(param.detach(), reference.value, rtol=0, atol=1e-5)


def test_settings_of_groups_are_read_in_every_step(soap64):
    """Learning rate (also as a tensor), betas, eps and weight decay of each group, changed on the way."""
    params = [make((8, 8), seed=seed)[0] for seed in (1, 2)]
    groups = [{"params": [params[0]]}, {"params": [params[1]], "lr": 0.05, "weight_decay": 0.3}]
    optimizer = SOAP(groups, **NUMBERS)
    references = [soap64.Reference(param, kl=False, **NUMBERS) for param in params]
    references[1].lr, references[1].weight_decay = 0.05, 0.3
    for number, grad in enumerate(gradients((8, 8), 6)):
        if number == 3:
            optimizer.param_groups[0].update(lr=torch.tensor(0.25), betas=(0.5, 0.75), shampoo_beta=0.5)
            references[0].lr, references[0].betas, references[0].shampoo_beta = 0.25, (0.5, 0.75), 0.5
            optimizer.param_groups[1].update(weight_decay=0.0, eps=0.5)
            references[1].weight_decay, references[1].eps = 0.0, 0.5
        for param in params:
            param.grad = grad.clone()
        optimizer.step()
        for reference in references:
            reference.step(grad)
    for param, reference in zip(params, references, strict=True):
        torch.testing.assert_close(param.detach(), reference.value, rtol=0, atol=1e-6)


def test_a_narrow_parameter_is_stepped_in_float32():
    """A bfloat16 parameter has float32 state, and moves as a float32 one does, to its rounding."""
    narrow, optimizer = make((8, 16), torch.bfloat16, first_step="initialize")
    wide = nn.Parameter(narrow.detach().float())
    other = SOAP([wide], **NUMBERS, first_step="initialize")
    for grad in gradients((8, 16), 3, dtype=torch.bfloat16):
        run(narrow, optimizer, [grad])
        run(wide, other, [grad.float()])
    assert {value.dtype for value in optimizer.state[narrow].values()} == {torch.float32}
    torch.testing.assert_close(narrow.float(), wide, rtol=0, atol=0.05)


def test_a_nan_stays_in_its_parameter():
    """Also in the first step, in which eigenvectors of NaN are asked for."""
    for steps in (0, 2):
        params = [make((300, 4), torch.float32, seed=seed)[0] for seed in (1, 2)]
        optimizer = SOAP(params, **NUMBERS)
        for grad in gradients((300, 4), steps, dtype=torch.float32):
            for param in params:
                param.grad = grad.clone()
            optimizer.step()
        params[0].grad, params[1].grad = torch.full((300, 4), torch.nan), torch.ones(300, 4)
        optimizer.step()
        assert params[0].isnan().all()
        assert params[1].isfinite().all()


def test_zero_gradients_move_nothing():
    """A factor of zeros has eigenvectors, and nothing is divided by zero."""
    param, optimizer = make((300, 4), torch.float32, weight_decay=0.0)
    before = param.detach().clone()
    run(param, optimizer, [torch.zeros(300, 4)] * 3)
    assert torch.equal(param.detach(), before)


def test_the_global_precision_of_products_is_left_alone():
    """A step sets its own and puts the user's back, also where it fails."""
    param, optimizer = make((8, 8), fp32_matmul_prec="medium")
    before = torch.get_float32_matmul_precision()
    run(param, optimizer, gradients((8, 8), 1))
    assert torch.get_float32_matmul_precision() == before
    param.grad = param.detach().to_sparse()
    with pytest.raises(GradientError, match=r"sparse gradient of parameter of shape \(8, 8\)"):
        optimizer.step()
    assert torch.get_float32_matmul_precision() == before


def test_closure():
    """It is called once, with gradients enabled, and its loss is returned."""
    param, optimizer = make((4, 4))

    def closure():
        param.grad = torch.ones(4, 4).double()
        return 3.0 if torch.is_grad_enabled() else 0.0

    before = param.detach().clone()
    assert optimizer.step(closure) == 3.0
    assert not torch.equal(param.detach(), before)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"lr": -1.0}, "lr=-1.0"),
        ({"betas": (0.9, 1.0)}, r"betas=\(0.9, 1.0\)"),
        ({"shampoo_beta": 1.0}, "shampoo_beta=1.0"),
        ({"eps": 0.0}, "eps=0.0"),
        ({"weight_decay": -0.1}, "weight_decay=-0.1"),
        ({"precondition_frequency": 0}, "precondition_frequency=0.*at least 1"),
        ({"max_precond_dim": -1}, "max_precond_dim=-1"),
        ({"extra_scale_factor": 0.0}, "extra_scale_factor=0.0"),
        ({"first_step": "skip"}, "first_step='skip'.*initialize"),
        ({"fp32_matmul_prec": "low"}, "fp32_matmul_prec='low'.*highest"),
        ({"max_update_rms": 0.0}, "max_update_rms=0.0.*greater than 0, or None"),
    ],
)
def test_arguments_are_checked(kwargs, message):
    """Each bad argument is named, with what is allowed."""
    with pytest.raises(ConfigurationError, match=message):
        SOAP([nn.Parameter(torch.ones(2, 2))], **kwargs)


@pytest.mark.parametrize("settings", [{}, {"orthogonalize": True}], ids=["plain", "orthogonalized"])
def test_cautious_decay_shrinks_where_update_and_weight_agree(settings):
    """The update, known from a run without decay, says which weights shrink; the key stands in the group."""
    numbers = {**NUMBERS, **settings}
    for grad in gradients((6, 10), 3):
        still, updating = make((6, 10), **{**numbers, "weight_decay": 0.0})
        start = still.detach().clone()
        run(still, updating, [grad])
        update = (start - still.detach()) / NUMBERS["lr"]
        param, optimizer = make((6, 10), **numbers, cautious_weight_decay=True)
        run(param, optimizer, [grad])
        decay = NUMBERS["weight_decay"] * start * (update * start >= 0)
        torch.testing.assert_close(
            param.detach(), start - NUMBERS["lr"] * (decay + update), rtol=0, atol=1e-12
        )
        assert optimizer.param_groups[0]["cautious_weight_decay"]
