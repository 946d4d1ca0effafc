"""What a norm that is too large does: it skips the step, or scales all gradients but the exempt ones."""

import math

import pytest
import torch
from torch import nn

from megaopt_core import ParamKey, get_canonical_lr_for_logging
from megaopt_core.errors import ConfigurationError, OverrideError
from megaopt_core.optimizers import ChainedOptimizer, StepResult

pytestmark = pytest.mark.any_python


def _norm(model: nn.Module) -> float:
    return math.sqrt(sum(param.grad.double().square().sum().item() for param in model.parameters()))


@pytest.mark.parametrize(
    ("dtype", "settings"),
    [
        (torch.float32, {}),
        (torch.float32, {"clip_grad": 1.0}),
        (torch.bfloat16, {"bf16": True}),
        (torch.bfloat16, {"bf16": True, "use_precision_aware_optimizer": True}),
        (torch.float16, {"fp16": True, "initial_loss_scale": 8.0, "loss_scale_window": 1}),
    ],
)
@pytest.mark.parametrize("chain", [False, True])
def test_a_norm_above_the_threshold_changes_nothing(
    mlp, build, give, snapshot, dtype, settings, chain
) -> None:
    """Parameters, states and the loss scale stay, in every precision; the norm and the zeros are told."""
    model = mlp(dtype)
    overrides = {ParamKey(name="2.weight"): {"optimizer": "t_momentum"}} if chain else {}
    optimizer = build(
        model, overrides=overrides, grad_norm_skip_threshold=1e3, log_num_zeros_in_grad=True, **settings
    )
    give(model)
    assert optimizer.step().update_successful
    before = snapshot(model, optimizer)
    scale = optimizer.get_loss_scale().item()
    give(model, 1, scale=1e4)
    expected = _norm(model) / scale
    result = optimizer.step()
    assert result == StepResult(False, pytest.approx(expected, rel=1e-5), 0)
    assert snapshot(model, optimizer) == before
    assert optimizer.get_loss_scale().item() == scale
    give(model, 2)
    assert optimizer.step().update_successful


def test_a_norm_of_nan_is_above_every_threshold(mlp, build, give) -> None:
    """In fp32, where a step on NaN is made otherwise."""
    model = mlp()
    optimizer = build(model, grad_norm_skip_threshold=10.0)
    before = [param.detach().clone() for param in model.parameters()]
    give(model)
    model[0].bias.grad[0] = float("nan")
    result = optimizer.step()
    assert not result.update_successful
    assert math.isnan(result.grad_norm)
    assert all(torch.equal(param, old) for param, old in zip(model.parameters(), before, strict=True))


def test_without_a_threshold_large_norms_step(mlp, build, give) -> None:
    """The default is infinite, and asks for no norm."""
    model = mlp()
    optimizer = build(model, "t_sgd")
    give(model, scale=1e30)
    assert optimizer.step() == StepResult(True, None, None)


@pytest.mark.parametrize("value", [0, -1.0, float("nan"), "1", True, None])
def test_a_threshold_is_a_number_above_zero(mlp, build, value) -> None:
    """0 would skip every step."""
    with pytest.raises(ConfigurationError) as caught:
        build(mlp(), grad_norm_skip_threshold=value)
    assert str(caught.value) == f"grad_norm_skip_threshold={value!r}: must be a number above 0, or inf"


def test_chained_optimizers_have_one_threshold(mlp, build) -> None:
    """They have one norm."""
    children = [build(mlp(), grad_norm_skip_threshold=limit) for limit in (1.0, 2.0)]
    with pytest.raises(ConfigurationError, match=r"grad_norm_skip_threshold=1\.0 and another .*=2\.0"):
        ChainedOptimizer(children)


@pytest.mark.parametrize("optimizer_name", ["t_sgd", "t_adam", "t_fused"])
def test_exempt_parameters_count_in_the_norm_and_are_not_scaled(mlp, build, give, optimizer_name) -> None:
    """Everything else is scaled by the factor of the norm over all, whoever applies it."""
    model, plain = mlp(), mlp()
    exempt = {ParamKey(name="2.*"): {"clip_grad": False}}
    ours = build(model, optimizer_name, overrides=exempt, clip_grad=0.1)
    theirs = build(plain, optimizer_name)
    for step in range(2):
        give(model, step)
        give(plain, step)
        norm = _norm(model)
        for name, param in plain.named_parameters():
            param.grad *= 1.0 if name.startswith("2.") else 0.1 / (norm + 1e-6)
        assert ours.step().grad_norm == pytest.approx(norm, rel=1e-6)
        theirs.step()
    for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=2e-6, atol=1e-8)


def test_main_gradients_of_exempt_parameters_are_not_scaled(mlp, build, give) -> None:
    """In bf16 the factor goes to main gradients; with SGD the step shows it."""
    model = mlp(torch.bfloat16)
    optimizer = build(
        model,
        "t_sgd",
        overrides={ParamKey(name="2.*"): {"clip_grad": False}},
        clip_grad=0.1,
        bf16=True,
        lr=1.0,
    )
    give(model)
    factor = 0.1 / (_norm(model) + 1e-6)
    expected = {
        name: param.detach().float() - param.grad.float() * (1.0 if name.startswith("2.") else factor)
        for name, param in model.named_parameters()
    }
    optimizer.step()
    for param, name in optimizer.names.items():
        torch.testing.assert_close(optimizer.state[param]["main_param"], expected[name], rtol=1e-5, atol=1e-7)


def test_all_exempt_is_no_clipping(mlp, build, give) -> None:
    """A fused step is given no divisor then."""
    model, plain = mlp(), mlp()
    ours = build(model, "t_fused", overrides={ParamKey(name="*"): {"clip_grad": False}}, clip_grad=0.1)
    theirs = build(plain, "t_fused")
    for net, optimizer in ((model, ours), (plain, theirs)):
        give(net)
        optimizer.step()
    for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine, other)


@pytest.mark.parametrize("value", [1.0, None, "no", 0])
def test_the_override_is_true_or_false(mlp, build, value) -> None:
    """It is a switch; a number would look like a limit of its own."""
    with pytest.raises(OverrideError) as caught:
        build(mlp(), overrides={ParamKey(name="2.*"): {"clip_grad": value}})
    assert str(caught.value) == f"override clip_grad={value!r}: must be True or False"


def test_the_canonical_learning_rate_is_the_first_that_no_override_touches(mlp, build) -> None:
    """Groups with a learning rate of their own are passed over; tensors are read."""
    overrides = {ParamKey(name="0.*"): {"max_lr": 0.5}, ParamKey(name="2.bias"): {"wd_mult": 0.0}}
    optimizer = build(mlp(), overrides=overrides, lr=0.25)
    assert get_canonical_lr_for_logging(optimizer.param_groups) == 0.25
    own = [group for group in optimizer.param_groups if group["lr"] == 0.5]
    assert get_canonical_lr_for_logging(own) is None
    assert get_canonical_lr_for_logging([{"default_config": True, "lr": torch.tensor(2.0)}]) == 2.0


@pytest.mark.parametrize(
    ("groups", "expected"),
    [
        ([], None),
        ([{"lr": 0.1}], None),
        ([{"lr": 0.1}, {"lr": 0.2, "default_config": True}], 0.2),
        ([{"default_config": True}], None),
        ([{"default_config": True, "lr": None}], None),
        ([{"default_config": True}, {"default_config": True, "lr": 0.1}], None),
        ([{"default_config": False, "lr": 0.1}], None),
        ([{"default_config": True, "lr": 0.1, "params": []}], 0.1),
        (({"default_config": 1, "lr": 3},), 3.0),
    ],
)
def test_the_canonical_learning_rate_of_groups_that_lack_something(groups, expected) -> None:
    """Megatron-core's function returns the same: a missing mark is False, a missing learning rate None."""
    assert get_canonical_lr_for_logging(groups) == expected


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_fused_step_is_clipped_whatever_the_default_dtype(mlp, build, give, dtype) -> None:
    """The divisor that a fused step takes is a number of 32 bits, also where torch makes others by default."""
    model, alone = mlp(), mlp()
    optimizer = build(model, "t_fused", clip_grad=0.1)
    expected = torch.optim.AdamW(alone.parameters(), lr=0.01, weight_decay=0.0, fused=True)
    give(model)
    give(alone)
    nn.utils.clip_grad_norm_(alone.parameters(), 0.1)
    expected.step()
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        optimizer.step()
    finally:
        torch.set_default_dtype(before)
    for mine, other in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize(("dtype", "settings"), [(torch.bfloat16, {"bf16": True}), (torch.float64, {})])
def test_a_norm_beyond_32_bits_is_clipped(mlp, build, dtype, settings) -> None:
    """Its divisor is no number of 32 bits; the gradients are finite, and so is the step."""
    model = mlp(dtype)
    overrides = {ParamKey(name="0.*"): {"optimizer": "t_sgd"}}
    optimizer = build(model, "t_fused", overrides=overrides, clip_grad=1.0, **settings)
    for param in model.parameters():
        param.grad = torch.full_like(param, 1e38)
    before = [param.detach().clone() for param in model.parameters()]
    assert optimizer.step().update_successful
    for param, old in zip(model.parameters(), before, strict=True):
        assert param.isfinite().all()
        assert not torch.equal(param, old)


def test_a_clipped_step_of_64_bits_is_exact_to_them(mlp, build, give) -> None:
    """The factor is not rounded to 32."""
    model, alone = mlp(torch.float64), mlp(torch.float64)
    optimizer = build(model, "t_fused", clip_grad=0.1)
    expected = torch.optim.AdamW(alone.parameters(), lr=0.01, weight_decay=0.0, fused=True, eps=1e-8)
    for step in range(3):
        give(model, step)
        give(alone, step)
        norm = _norm(alone)
        for param in alone.parameters():
            param.grad.mul_(0.1 / (norm + 1e-6))
        optimizer.step()
        expected.step()
    for mine, other in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-13, atol=1e-15)
