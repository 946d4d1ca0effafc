"""A step that is far longer than the learning rate allows is warned of once, and bounded on request."""

import copy
import warnings
from typing import Any

import pytest
import torch
from megaopt_soap.soap import SOAP, init_state
from torch import nn

from megaopt_core import MatrixView, build_optimizer
from megaopt_core.optimizers import MegatronOptimizer

pytestmark = pytest.mark.any_python

NUMBERS = {"lr": 0.02, "betas": (0.9, 0.95), "shampoo_beta": 0.9, "eps": 1e-6, "weight_decay": 0.1}


def low_rank(shape: tuple[int, int], count: int, rank: int = 1) -> list[torch.Tensor]:
    """Return gradients as of batches with fewer rows than the matrix."""
    chance = torch.Generator().manual_seed(0)
    return [
        torch.randn(shape[0], rank, generator=chance) @ torch.randn(rank, shape[1], generator=chance)
        for _ in range(count)
    ]


def run(param: torch.Tensor, optimizer: torch.optim.Optimizer, grads: list[torch.Tensor]) -> None:
    """Step once with each gradient."""
    for grad in grads:
        param.grad = grad.clone()
        optimizer.step()


def two_matrices(**settings: Any) -> tuple[nn.Sequential, MegatronOptimizer]:
    """Return a model of two hidden matrices and its optimizer."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32, bias=False), nn.Linear(32, 32, bias=False))
    for layer in model:
        layer.weight.matrix_view = MatrixView()
    return model, build_optimizer(model, "soap", lr=0.01, clip_grad=0.0, **settings)


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
    """Step with gradients of rank one; return the longest step of a matrix in its root mean square."""
    longest = 0.0
    for grad in low_rank((32, 32), 12):
        before = [param.detach().clone() for param in model.parameters()]
        for param in model.parameters():
            param.grad = grad.clone()
        optimizer.step()
        moved = [now.detach() - then for now, then in zip(model.parameters(), before, strict=True)]
        longest = max(longest, *(change.square().mean().sqrt().item() for change in moved))
    return longest


def test_the_first_long_step_is_warned_of_by_name():
    """Once for an optimizer, with the settings that help."""
    model, optimizer = two_matrices()
    with pytest.warns(UserWarning, match="SOAP moved") as caught:
        longest = train(model, optimizer)
    assert longest > 10 * 0.01
    assert len(caught) == 1
    text = str(caught[0].message)
    assert text.startswith("SOAP moved '0.weight' by ")
    assert "soap_precondition_frequency=10" in text
    assert "soap_max_update_rms=1" in text


def test_each_expert_of_a_batch_is_looked_at():
    """One that few tokens reach has long steps beside others that have none."""
    weight = nn.Parameter(torch.zeros(2, 32, 32))
    optimizer = SOAP([weight], lr=0.01, first_step="initialize")
    weight.param_info = type("Info", (), {"name": "experts", "view": MatrixView(batch_dims=1)})()
    chance = torch.Generator().manual_seed(1)
    grads = [torch.stack([torch.randn(32, 32, generator=chance), grad]) for grad in low_rank((32, 32), 12)]
    with pytest.warns(UserWarning, match="SOAP moved 'experts' by"):
        run(weight, optimizer, grads)


@pytest.mark.parametrize(
    "settings",
    [
        {"soap_precondition_frequency": 10},
        {"soap_max_update_rms": 1.0},
        {"soap_orthogonalize": True},
    ],
    ids=str,
)
def test_what_the_warning_recommends_keeps_steps_short(settings):
    """With the recommended frequency, with a bound, and where updates are orthogonalized."""
    model, optimizer = two_matrices(weight_decay=0.0, **settings)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert train(model, optimizer) <= 1.01 * 0.01


def test_the_class_by_itself_warns_by_shape_and_so_does_a_copy():
    """Nobody has told it a name."""
    for make in (lambda optimizer: optimizer, copy.deepcopy):
        weight = nn.Parameter(torch.zeros(32, 32))
        optimizer = make(SOAP([weight], lr=0.01))
        (param,) = optimizer.param_groups[0]["params"]
        with pytest.warns(UserWarning, match=r"SOAP moved a parameter of shape \(32, 32\) by"):
            run(param, optimizer, low_rank((32, 32), 12))


@pytest.mark.parametrize("settings", [{}, {"cautious_weight_decay": True}, {"orthogonalize": True}], ids=str)
@pytest.mark.parametrize("kl", [False, True])
@pytest.mark.parametrize("frequency", [1, 3])
def test_bounded_steps_follow_the_formula(soap64, kl, frequency, settings):
    """In float64: the update is scaled down to the bound, before weight decay; shorter ones are left."""
    from emerging_optimizers.orthogonalized_optimizers.muon_utils import newton_schulz

    bound, shortened = 0.15 if settings.get("orthogonalize") else 0.7, []

    def bounded(update: torch.Tensor) -> torch.Tensor:
        if settings.get("orthogonalize"):
            update = 0.2 * 10**0.5 * newton_schulz(update.float(), 5, "quintic").double()
        rms = update.square().mean().sqrt()
        shortened.append(bool(rms > bound))
        return update * min(1.0, float(bound / rms))

    value = torch.randn(6, 10, generator=torch.Generator().manual_seed(1)).double()
    numbers = NUMBERS | ({"weight_decay": 0.0} if settings.get("cautious_weight_decay") else {})
    param = nn.Parameter(value.clone())
    optimizer = SOAP(
        [param],
        **numbers,
        use_kl_shampoo=kl,
        precondition_frequency=frequency,
        max_update_rms=bound,
        **settings,
    )
    reference = soap64.Reference(value, kl=kl, **numbers)
    reference.begin_at(5, torch.Generator().manual_seed(3))
    init_state(optimizer)
    soap64.give_state(optimizer.state[param], reference)
    for grad in low_rank((6, 10), 8, rank=4):
        param.grad = grad.double()
        optimizer.step()
        reference.step(grad, frequency=frequency, transform=bounded)
    tolerance = 1e-5 if settings.get("orthogonalize") else 1e-10
    torch.testing.assert_close(param.detach(), reference.value, rtol=0, atol=tolerance)
    assert any(shortened)
    assert all(shortened) is bool(settings.get("orthogonalize"))


def test_a_bound_changes_no_bit_of_shorter_steps():
    """Neither of parameters nor of state."""
    runs = []
    for bound in (None, 1e6):
        weight = nn.Parameter(torch.ones(8, 8))
        optimizer = SOAP([weight], **NUMBERS, max_update_rms=bound)
        for grad in low_rank((8, 8), 5, rank=8):
            weight.grad = grad
            optimizer.step()
        runs.append([weight.detach(), *optimizer.state[weight].values()])
    assert all(torch.equal(one, other) for one, other in zip(*runs, strict=True))


def test_a_bound_leaves_what_is_zero_or_not_finite():
    """Nothing is divided by zero, and a NaN stays in its parameter."""
    params = [nn.Parameter(torch.ones(4, 4)) for _ in range(2)]
    optimizer = SOAP(params, lr=0.01, weight_decay=0.0, max_update_rms=1.0)
    for value in (0.0, torch.nan):
        params[0].grad, params[1].grad = torch.zeros(4, 4), torch.full((4, 4), value)
        optimizer.step()
    assert torch.equal(params[0].detach(), torch.ones(4, 4))
    assert params[1].isnan().all()
