"""Mixed precision: fp32 main parameters beside the model's."""

import pytest
import torch
from megaopt_lowbit.remainders import split_remainder
from torch import nn

from megaopt_core.precision import MainParams

pytestmark = pytest.mark.any_python

BETA1, BETA2, EPS, LR, WD = 0.9, 0.999, 1e-8, 0.01, 0.1


class ReferenceAdam:
    """AdamW on fp32 copies of bf16 parameters, written out."""

    def __init__(self, params: list[nn.Parameter]) -> None:
        self.params, self.step_count = params, 0
        self.mains = [param.detach().clone().float() for param in params]
        self.first = [torch.zeros_like(main) for main in self.mains]
        self.second = [torch.zeros_like(main) for main in self.mains]

    @torch.no_grad()
    def step(self) -> None:
        self.step_count += 1
        step_size = LR / (1 - BETA1**self.step_count)
        correction = (1 - BETA2**self.step_count) ** 0.5
        for param, main, m, v in zip(self.params, self.mains, self.first, self.second, strict=True):
            grad = param.grad.float()
            main.mul_(1 - LR * WD)
            m.lerp_(grad, 1 - BETA1)
            v.mul_(BETA2).addcmul_(grad, grad, value=1 - BETA2)
            main.addcdiv_(m, (v.sqrt() / correction).add_(EPS), value=-step_size)
            param.copy_(main)


def test_bf16_adam_is_bit_equal_to_a_reference_for_20_steps(mlp, build, give) -> None:
    """Main parameters, moments and model parameters have the bits of an fp32 AdamW written out."""
    ours, theirs = mlp(torch.bfloat16), mlp(torch.bfloat16)
    optimizer = build(ours, lr=LR, weight_decay=WD, bf16=True)
    reference = ReferenceAdam(list(theirs.parameters()))
    for step in range(20):
        give(ours, step)
        give(theirs, step)
        optimizer.step()
        reference.step()
        for index, (mine, other) in enumerate(zip(ours.parameters(), theirs.parameters(), strict=True)):
            assert torch.equal(mine, other)
            assert torch.equal(optimizer.state[mine]["main_param"], reference.mains[index])
            assert torch.equal(optimizer.state[mine]["exp_avg"], reference.first[index])
            assert torch.equal(optimizer.state[mine]["exp_avg_sq"], reference.second[index])


def test_small_updates_add_up_that_bf16_alone_would_lose(build) -> None:
    """Updates far below half a bf16 step arrive in the model once there are enough of them."""
    model = nn.Linear(1, 1, bias=False, dtype=torch.bfloat16)
    model.weight.data.fill_(1.0)
    optimizer = build(model, "t_sgd", lr=1e-4, bf16=True)
    for _ in range(100):
        model.weight.grad = torch.ones_like(model.weight)
        optimizer.step()
    assert optimizer.get_main_params()[0].item() == pytest.approx(0.99, abs=1e-5)
    assert model.weight.item() == torch.tensor(0.99).bfloat16().item()


def test_fp32_parameters_of_a_bf16_model_are_stepped_in_place(mlp, build, give) -> None:
    """Only what is coarse gets a copy."""
    model = mlp(torch.bfloat16)
    model[2].float()
    optimizer = build(model, bf16=True)
    assert [
        tensor is param for tensor, param in zip(optimizer.get_main_params(), model.parameters(), strict=True)
    ] == [
        False,
        False,
        True,
        True,
    ]
    assert [("main_param" in optimizer.state[param]) for param in model.parameters()] == [
        True,
        True,
        False,
        False,
    ]
    give(model)
    before = model[2].weight.detach().clone()
    optimizer.step()
    assert not torch.equal(before, model[2].weight)


def test_main_grad_wins_over_grad_and_zero_grad_clears_both(mlp, build, give) -> None:
    """Where a buffer provides `main_grad`, that is the gradient; it is filled with zeros, never dropped."""
    model = mlp(torch.bfloat16)
    optimizer = build(model, "t_sgd", lr=1.0, bf16=True)
    give(model)
    for param in model.parameters():
        param.main_grad = torch.full(param.shape, 0.5)
    before = [main.detach().clone() for main in optimizer.get_main_params()]
    optimizer.step()
    for old, main in zip(before, optimizer.get_main_params(), strict=True):
        assert torch.equal(main, old - 0.5)
    optimizer.zero_grad()
    assert all(param.grad is None and not param.main_grad.any() for param in model.parameters())


def test_main_grad_of_an_fp32_model_is_lent_for_the_step(mlp, build) -> None:
    """Afterwards `grad` is None again, so that backward does not add to the buffer twice."""
    model = mlp()
    optimizer = build(model, "t_sgd", lr=1.0)
    for param in model.parameters():
        param.main_grad = torch.ones_like(param)
    before = model[0].weight.detach().clone()
    optimizer.step()
    assert torch.equal(model[0].weight, before - 1.0)
    assert all(param.grad is None for param in model.parameters())


def test_zero_grad_fills_where_it_is_told_to(mlp, build, give) -> None:
    """`set_to_none=False` keeps the tensors."""
    model = mlp()
    optimizer = build(model)
    give(model)
    kept = [param.grad for param in model.parameters()]
    optimizer.zero_grad(set_to_none=False)
    for grad, param in zip(kept, model.parameters(), strict=True):
        assert param.grad.data_ptr() == grad.data_ptr()
        assert not param.grad.any()


def test_gradients_of_main_parameters_are_dropped_after_a_step(mlp, build, give) -> None:
    """fp32 gradients need memory during a step only; the model's own stay."""
    model = mlp(torch.bfloat16)
    optimizer = build(model, bf16=True)
    give(model)
    optimizer.step()
    assert all(main.grad is None for main in optimizer.get_main_params())
    assert all(param.grad is not None for param in model.parameters())


@pytest.mark.parametrize("settings", [{}, {"use_precision_aware_optimizer": True}])
def test_reload_takes_the_models_values(mlp, build, give, settings) -> None:
    """After weights were loaded into the model, the next step starts from what rounds to them."""
    model, other = mlp(torch.bfloat16), mlp(torch.bfloat16, seed=1)
    optimizer = build(model, bf16=True, **settings)
    give(model)
    optimizer.step()
    model.load_state_dict(other.state_dict())
    optimizer.reload_model_params()
    for param in model.parameters():
        main = optimizer.state[param]["main_param"]
        assert torch.equal(split_remainder(main)[0], param.detach())
        if not settings:  # a remainder says nothing about the value that it was split from
            assert torch.equal(main, param.float())


def test_main_parameters_are_in_the_state_and_can_be_set(mlp, build) -> None:
    """`state[param]["main_param"]` is the main copy itself."""
    model = mlp(torch.bfloat16)
    optimizer = build(model, bf16=True)
    state = optimizer.state[model[0].bias]
    assert state["main_param"] is optimizer.get_main_params()[1]
    state["main_param"] = torch.full((7,), 0.25)
    assert optimizer.get_main_params()[1].tolist() == [0.25] * 7


def test_dtypes_of_main_copies_follow_the_policy() -> None:
    """A policy without pieces has no tensors."""
    assert MainParams().attach([]) == []
