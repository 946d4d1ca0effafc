"""The step: its order, its results, norms, clipping, and what a skipped step leaves behind."""

import math
import warnings
from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from megaopt_core import FP32Optimizer, OptimizerConfig, ParamKey
from megaopt_core.errors import ConfigurationError
from megaopt_core.optimizers import StepResult
from megaopt_core.optimizers._gradients import statistics


def _grads(model: nn.Module) -> list[torch.Tensor | None]:
    return [param.grad for param in model.parameters()]


def _norm(model: nn.Module) -> float:
    return math.sqrt(sum(grad.double().square().sum().item() for grad in _grads(model)))


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, StepResult(True, None, None)),
        ({"bf16": True}, StepResult(True, 0.0, 0)),
    ],
)
def test_result_without_clipping_and_counting(mlp, build, give, settings, expected) -> None:
    """What was not asked for is None in fp32 and zero in mixed precision."""
    model = mlp(torch.bfloat16 if settings else torch.float32)
    optimizer = build(model, **settings)
    give(model)
    assert optimizer.step() == expected


def test_result_has_the_norm_before_clipping_and_the_zeros(mlp, build, give) -> None:
    """Both are of the gradients as they came."""
    model = mlp()
    optimizer = build(model, clip_grad=0.1, log_num_zeros_in_grad=True)
    give(model)
    model[0].bias.grad.zero_()
    expected = _norm(model)
    result = optimizer.step()
    assert result.grad_norm == pytest.approx(expected, rel=1e-6)
    assert result.num_zeros_in_grad == 7
    assert optimizer.grad_norms == {None: result.grad_norm}


@pytest.mark.parametrize("optimizer_name", ["t_adam", "t_fused", "t_sgd", "t_momentum"])
@pytest.mark.parametrize("limit", [0.01, 1.0, 1e6])
def test_clipping_is_torchs(mlp, build, give, optimizer_name, limit) -> None:
    """Parameters agree with `clip_grad_norm_` and the same torch optimizer, whoever applies the factor."""
    ours, theirs = mlp(), mlp()
    optimizer = build(ours, optimizer_name, clip_grad=limit)
    inner = optimizer.parts[0].inner
    settings = {
        key: inner.defaults[key]
        for key in ("lr", "weight_decay", "momentum", "foreach", "fused")
        if key in inner.defaults
    }
    expected = type(inner)(theirs.parameters(), **settings)
    for step in range(3):
        give(ours, step)
        give(theirs, step)
        optimizer.step()
        nn.utils.clip_grad_norm_(theirs.parameters(), limit)
        expected.step()
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=2e-6, atol=1e-8)


def test_unclipped_gradients_are_not_touched(mlp, build, give) -> None:
    """With a factor of 1 no pass is made: the gradients keep their bits and their version."""
    model = mlp()
    optimizer = build(model, clip_grad=1e6)
    give(model)
    before = [(grad.clone(), grad._version) for grad in _grads(model)]
    optimizer.step()
    for (values, version), grad in zip(before, _grads(model), strict=True):
        assert torch.equal(values, grad)
        assert grad._version == version


def test_a_nan_norm_makes_every_gradient_nan_as_in_torch(mlp, build, give) -> None:
    """In fp32 a step on non-finite gradients is made, with clipping as torch clips."""
    model = mlp()
    optimizer = build(model, "t_sgd", clip_grad=1.0)
    give(model)
    model[0].bias.grad[0] = float("nan")
    assert optimizer.step().update_successful
    assert all(param.isnan().all() for param in model.parameters())


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize(
    ("dtype", "settings"),
    [
        (torch.bfloat16, {"bf16": True}),
        (torch.bfloat16, {"bf16": True, "clip_grad": 1.0, "log_num_zeros_in_grad": True}),
        (torch.float16, {"fp16": True, "initial_loss_scale": 8.0}),
        (torch.float16, {"fp16": True, "loss_scale": 8.0}),
        (torch.bfloat16, {"bf16": True, "use_precision_aware_optimizer": True, "exp_avg_dtype": "fp16"}),
    ],
)
def test_a_non_finite_gradient_changes_nothing(mlp, build, give, snapshot, value, dtype, settings) -> None:
    """Parameters, states, step counts and settings keep their bits, over all chained children."""
    model = mlp(dtype)
    overrides = {ParamKey(name="2.weight"): {"optimizer": "t_momentum"}}
    optimizer = build(model, overrides=overrides, **settings)
    for step in range(2):
        give(model, step)
        optimizer.step()
    before = snapshot(model, optimizer)
    give(model, 2)
    model[0].bias.grad[1] = value
    assert optimizer.step() == StepResult(False, None, None)
    assert snapshot(model, optimizer) == before
    assert [part.changed for part in optimizer.report(after_step=True).parts] == [0, 0]
    give(model, 3)
    assert optimizer.step().update_successful


def test_finite_gradients_whose_squares_overflow_are_stepped(mlp, build, give) -> None:
    """Only infinities and NaNs skip a step; the norm is computed in a wider range then."""
    model = mlp(torch.bfloat16)
    optimizer = build(model, bf16=True, clip_grad=1.0)
    give(model, scale=1e25)
    expected = _norm(model)
    result = optimizer.step()
    assert result.update_successful
    assert result.grad_norm == pytest.approx(expected, rel=1e-5)


def test_the_stages_one_by_one_are_the_step(mlp, build, give) -> None:
    """`prepare_grads`, `clip_grad_norm` and `step_with_ready_grads` do what `step` does."""
    whole, apart = mlp(torch.bfloat16), mlp(torch.bfloat16)
    first, second = build(whole, bf16=True, clip_grad=0.1), build(apart, bf16=True)
    give(whole)
    give(apart)
    norm = first.step().grad_norm
    assert second.prepare_grads() is False
    assert second.get_grad_norm() == norm
    assert second.count_zeros() == 0
    assert second.clip_grad_norm(0.1) == norm
    assert second.step_with_ready_grads() is True
    assert all(torch.equal(*pair) for pair in zip(whole.parameters(), apart.parameters(), strict=True))


def test_prepare_grads_reports_what_is_not_finite(mlp, build, give) -> None:
    """In mixed precision it is True; the scaler has taken note."""
    model = mlp(torch.float16)
    optimizer = build(model, fp16=True, initial_loss_scale=8.0, hysteresis=1)
    give(model)
    model[0].weight.grad[0, 0] = float("inf")
    assert optimizer.prepare_grads() is True
    assert optimizer.get_loss_scale().tolist() == [4.0]


def test_a_closure_runs_once_before_gradients_are_collected(mlp, build) -> None:
    """Its gradients are those that are stepped, with autograd on, also in a chain."""
    model = mlp()
    optimizer = build(model, overrides={ParamKey(name="0.*"): {"optimizer": "t_sgd"}})
    calls = []

    def closure() -> torch.Tensor:
        calls.append(1)
        optimizer.zero_grad()
        loss = model(torch.ones(2, 5)).square().sum()
        loss.backward()
        return loss

    before = [param.clone() for param in model.parameters()]
    with torch.no_grad():
        optimizer.step(closure)
    assert calls == [1]
    assert not any(torch.equal(*pair) for pair in zip(before, model.parameters(), strict=True))


def test_norm_groups_are_measured_and_clipped_apart(mlp, build, give) -> None:
    """A parameter with `grad_norm_group` enters that norm and is scaled by its factor."""
    ours, theirs = mlp(), mlp()
    ours[2].weight.grad_norm_group = "head"
    optimizer = build(ours, "t_sgd", lr=1.0, clip_grad=0.5)
    give(ours)
    give(theirs)
    head, rest = [theirs[2].weight], [*theirs[0].parameters(), theirs[2].bias]
    norms = [nn.utils.clip_grad_norm_(params, 0.5).item() for params in (rest, head)]
    result = optimizer.step()
    torch.optim.SGD(theirs.parameters(), lr=1.0).step()
    assert optimizer.has_grad_norm_group("head")
    assert not optimizer.has_grad_norm_group("tail")
    assert optimizer.grad_norms == pytest.approx({None: norms[0], "head": norms[1]}, rel=1e-6)
    assert result.grad_norm == optimizer.grad_norms[None]
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-6, atol=1e-7)


def test_a_shared_parameter_is_stepped_but_not_counted(mlp, build, give) -> None:
    """Another pipeline stage counts it."""
    model = mlp()
    model[0].weight.shared = True
    optimizer = build(model, clip_grad=1e6)
    give(model)
    expected = math.sqrt(sum(grad.square().sum().item() for grad in _grads(model)[1:]))
    before = model[0].weight.detach().clone()
    assert optimizer.step().grad_norm == pytest.approx(expected, rel=1e-6)
    assert not torch.equal(before, model[0].weight)


def test_loss_scale_multiplies_the_loss_and_divides_the_gradients(mlp, build) -> None:
    """A power of two leaves no trace in what is stepped."""
    scaled, plain = mlp(torch.float16), mlp(torch.float16)
    optimizers = [build(scaled, fp16=True, loss_scale=64.0), build(plain, fp16=True, loss_scale=1.0)]
    for model, optimizer in zip((scaled, plain), optimizers, strict=True):
        loss = model(torch.ones(2, 5, dtype=torch.float16)).float().square().sum()
        assert optimizer.scale_loss(loss).item() == loss.item() * optimizer.get_loss_scale().item()
        optimizer.scale_loss(loss).backward()
        optimizer.step()
    assert all(torch.equal(*pair) for pair in zip(scaled.parameters(), plain.parameters(), strict=True))


def test_loss_is_left_alone_where_nothing_scales(mlp, build) -> None:
    """In fp32 and bf16 the scale is 1 and the loss the same object."""
    optimizer = build(mlp())
    loss = torch.ones(())
    assert optimizer.scale_loss(loss) is loss
    assert optimizer.get_loss_scale().tolist() == [1.0]


def test_a_trainer_that_clips_as_well_is_told_once(mlp, build, give) -> None:
    """Five steps whose norm is the trainer's limit are enough to know."""
    model = mlp()
    optimizer = build(model, clip_grad=1.0)
    caught = []
    for step in range(8):
        give(model, step)
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        with warnings.catch_warnings(record=True) as now:
            warnings.simplefilter("always")
            optimizer.step()
        caught.append([str(warning.message) for warning in now])
    message = (
        "the gradient norm was 0.5 in 5 steps in a row: something clips or normalises gradients before "
        "optimizer.step(), which clips them too (clip_grad=1). Keep one of the two: set clip_grad=0.0, or switch the "
        "trainer's clipping off"
    )
    assert sorted(caught) == [[]] * 7 + [[message]]


@pytest.mark.parametrize("scale", [1.0, 1e-3])
def test_norms_that_nobody_clipped_are_no_reason_to_warn(mlp, build, give, scale) -> None:
    """Neither gradients that repeat nor gradients that differ look like clipping."""
    model = mlp()
    optimizer = build(model, clip_grad=1.0)
    for step in (0, 0, 0, 0, 1, 2, 3):
        give(model, step, scale)
        optimizer.step()
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    model[0].bias.grad[0] = 0.5
    for _ in range(5):
        optimizer.step()


def test_stages_are_timed_in_order_and_marked_for_the_profiler(mlp, build, give) -> None:
    """Timers are asked for by their standard names at log level 1; profiler ranges carry the same names."""
    seen: list[tuple[str, int, str, bool | None]] = []

    class Timer:
        def __init__(self, name: str, level: int) -> None:
            self.key = name, level

        def start(self, barrier: bool = False) -> None:
            seen.append((*self.key, "start", barrier))

        def stop(self) -> None:
            seen.append((*self.key, "stop", None))

    model = mlp(torch.float16)

    def timers(name: str, log_level: int) -> Timer:
        return Timer(name, log_level)

    timed = {"timers": timers, "barrier_with_L1_time": True}
    optimizer = build(model, fp16=True, clip_grad=1.0, log_num_zeros_in_grad=True, loss_scale=1.0, **timed)
    give(model)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        optimizer.step()
    names = [
        "optimizer-copy-to-main-grad",
        "optimizer-unscale-and-check-inf",
        "optimizer-count-zeros",
        "optimizer-clip-main-grad",
        "optimizer-inner-step",
        "optimizer-copy-main-to-model-params",
        "params-all-gather",
    ]
    # Parameters begin to travel in one stage, and are waited for in another.
    expected = [
        entry
        for name in [*names, "params-all-gather"]
        for entry in ((name, 1, "start", True), (name, 1, "stop", None))
    ]
    assert seen == expected
    ranges = {event.key for event in profiler.key_averages()}
    assert {f"megaopt::{name}" for name in names} <= ranges


def test_a_stage_that_fails_stops_its_timer(mlp, build) -> None:
    """A timer that was started is stopped whatever happens."""
    running = []

    class Timer:
        def start(self, barrier: bool = False) -> None:
            running.append(1)

        def stop(self) -> None:
            running.pop()

    model = mlp()
    optimizer = build(model, timers=lambda name, log_level: Timer())
    model[0].weight.grad = torch.full((7, 5), 1.0)
    optimizer.parts[0].inner.step = lambda: 1 / 0
    with pytest.raises(ZeroDivisionError):
        optimizer.step()
    assert running == []


def test_parameters_without_a_gradient_are_left_alone(mlp, build, give) -> None:
    """As in torch, None means no step for this parameter."""
    model = mlp()
    optimizer = build(model, clip_grad=1.0)
    give(model)
    model[0].weight.grad = None
    before = model[0].weight.detach().clone()
    optimizer.step()
    assert torch.equal(before, model[0].weight)


def test_a_step_without_any_gradient_is_made(build, mlp) -> None:
    """Its norm is zero, and it says so."""
    optimizer = build(mlp(), clip_grad=1.0)
    with pytest.warns(UserWarning, match="no parameter has a gradient"):
        assert optimizer.step().grad_norm == 0.0


@pytest.mark.parametrize("clip_grad", [0.0, 1.0])
def test_sparse_gradients_reach_the_inner_optimizer(clip_grad) -> None:
    """Where no norm is asked for, an optimizer that takes sparse gradients gets them."""
    table = nn.Embedding(5, 2, sparse=True)
    config = OptimizerConfig(lr=1.0, clip_grad=clip_grad)
    optimizer = FP32Optimizer(
        torch.optim.SGD(table.parameters(), lr=1.0, foreach=False), config, lambda *_: None
    )
    table(torch.tensor([1])).sum().backward()
    before = table.weight.detach().clone()
    if clip_grad:
        with pytest.raises(RuntimeError, match="a sparse gradient of shape"):
            optimizer.step()
    else:
        optimizer.step()
        assert (before - table.weight).sum(1).tolist() == pytest.approx([0.0, 2.0, 0.0, 0.0, 0.0])


def test_complex_parameters_are_measured_and_clipped() -> None:
    """The norm is over real and imaginary parts."""
    weight = nn.Parameter(torch.zeros(3, dtype=torch.complex64))
    optimizer = FP32Optimizer(torch.optim.SGD([weight], lr=1.0), OptimizerConfig(lr=1.0, clip_grad=1.0))
    weight.grad = torch.tensor([3j, 4.0, 0j])
    assert optimizer.step().grad_norm == 5.0
    assert weight.abs().square().sum().sqrt().item() == pytest.approx(1.0, rel=1e-5)


def test_learning_rates_written_into_groups_hold_at_once(mlp, build, give) -> None:
    """What a user sets between steps is what the next step uses, without a scheduler."""
    model = mlp()
    optimizer = build(model, "t_sgd")
    moves = []
    for lr in (0.1, 0.2, 0.4):
        optimizer.param_groups[0]["lr"] = lr
        give(model)
        before = model[0].weight.detach().clone()
        optimizer.step()
        moves.append((model[0].weight - before).norm().item())
    assert [b / a for a, b in pairwise(moves)] == pytest.approx([2.0, 2.0], rel=1e-4)


@pytest.mark.parametrize(
    ("dtype", "settings"),
    [
        (torch.float32, {"clip_grad": 1e-3}),
        (torch.bfloat16, {"bf16": True, "clip_grad": 1e-3}),
        (torch.float16, {"fp16": True, "loss_scale": 1.0, "clip_grad": 1e-3}),
        (torch.float32, {}),
    ],
)
@pytest.mark.parametrize("steps_before", [0, 1])
def test_the_host_reads_the_device_once_a_step(
    mlp, build, give, monkeypatch, steps_before, dtype, settings
) -> None:
    """Flag, norms and zeros come in one read; without clipping in fp32 there is none; in the first step too."""
    model = mlp(dtype)
    wanted = 1 if settings else 0
    optimizer = build(model, "t_fused", log_num_zeros_in_grad=bool(settings), **settings)
    for _ in range(steps_before):
        give(model)
        optimizer.step()
    monkeypatch.setattr(statistics, "is_read_freely", lambda device: False)  # sums, as on an accelerator
    reads = []
    to_list = torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda tensor: reads.append("list") or to_list(tensor))

    class Reads(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if function is torch.ops.aten._local_scalar_dense.default:
                reads.append("scalar")
            return function(*args, **(kwargs or {}))

    give(model, 1)
    with Reads():
        optimizer.step()
    scaler_reads = 1 if "fp16" in settings else 0  # of a scale that lives on the host
    assert reads == ["scalar"] * scaler_reads + ["list"] * wanted


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_a_gradient_that_another_rank_counts_skips_the_step_too(mlp, build, give, snapshot, value) -> None:
    """It enters no norm here, but it would be stepped here."""
    model = mlp(torch.bfloat16)
    model[2].bias.shared = True
    optimizer = build(model, bf16=True, clip_grad=1.0)
    before = snapshot(model, optimizer)
    give(model)
    model[2].bias.grad[1] = value
    assert optimizer.step() == StepResult(False, None, None)
    assert snapshot(model, optimizer) == before


@pytest.mark.parametrize(
    ("dtype", "loss_scale"), [(torch.float32, None), (torch.bfloat16, None), (torch.bfloat16, 1.0)]
)
@pytest.mark.parametrize("by_hand", [False, True])
def test_gradients_whose_squares_overflow_are_clipped_by_their_norm(
    mlp, build, give, dtype, loss_scale, by_hand
) -> None:
    """The norm is finite as long as the gradients are."""
    model = mlp(dtype)
    optimizer = build(model, bf16=dtype is torch.bfloat16, clip_grad=1.0, loss_scale=loss_scale)
    give(model, scale=1e20)
    expected = math.sqrt(sum(param.grad.double().square().sum().item() for param in model.parameters()))
    if by_hand:
        assert optimizer.prepare_grads() is False
        norm = optimizer.clip_grad_norm(1.0)
    else:
        norm = optimizer.step().grad_norm
    assert norm == pytest.approx(expected, rel=1e-6)


def test_a_skipped_step_is_logged(mlp, build, give, caplog) -> None:
    """Under the module's own name, with the loss scale that follows."""
    model = mlp(torch.float16)
    optimizer = build(model, fp16=True, initial_loss_scale=8.0, hysteresis=1)
    give(model)
    model[0].bias.grad[0] = math.inf
    with caplog.at_level("INFO", logger="megaopt_core"):
        optimizer.step()
    [record] = caplog.records
    assert record.name == "megaopt_core.optimizers._step.pipeline"
    assert record.getMessage().endswith("not finite on some rank; the loss scale is 4 now")


@pytest.mark.parametrize("limit", [float("nan"), -1.0, "1", None, True])
def test_a_limit_that_is_no_norm_is_refused(mlp, build, give, limit) -> None:
    """NaN compares false with everything: it would make every gradient NaN, or clip nothing."""
    model = mlp()
    optimizer = build(model)
    give(model)
    optimizer.prepare_grads()
    with pytest.raises(ConfigurationError) as caught:
        optimizer.clip_grad_norm(limit)
    assert str(caught.value) == f"clip_grad={limit!r}: must be a number of at least 0"


def test_an_infinite_limit_measures_only(mlp, build, give) -> None:
    """As with torch's `clip_grad_norm_`, a way to ask for the norm."""
    model = mlp()
    optimizer = build(model, "t_sgd", lr=1.0)
    give(model)
    expected = [param.detach() - param.grad for param in model.parameters()]
    optimizer.prepare_grads()
    assert optimizer.clip_grad_norm(float("inf")) > 0
    optimizer.step_with_ready_grads()
    for want, param in zip(expected, model.parameters(), strict=True):
        torch.testing.assert_close(param.detach(), want)
