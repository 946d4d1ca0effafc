"""What a step makes of gradients: accumulated ones, and ones that are not finite."""

from __future__ import annotations

from typing import Any

import torch

from megaopt_core.errors import MegaoptError
from megaopt_core.optimizers import MegatronOptimizer
from megaopt_core.params import Granularity
from megaopt_core.registry import get_registry
from megaopt_testing.long_run import built_few, step_few
from megaopt_testing.snapshot import differences, params_of, snapshot, state_of
from megaopt_testing.trial import MICRO_BATCHES, Trial, some

__all__ = ["check_gradient_accumulation", "check_non_finite_gradients"]

type _Params = dict[str, torch.Tensor]

_POISONED = "blocks.0.up.weight"


def check_gradient_accumulation(optimizer: str, **settings: Any) -> None:
    """Gradients accumulated over micro-batches step as those of the whole batch do, bit for bit.

    The gradients have the same bits either way, so whatever differs looks at the backward passes themselves.

    Args:
        optimizer: registered name.
        **settings: fields of the configuration.

    Raises:
        ConformanceError: parameters, state or group settings differ after three steps.
    """
    trial = Trial(optimizer, settings)
    results = []
    for micro_batches in (1, MICRO_BATCHES):
        model = trial.model()
        torch.manual_seed(0)
        built = trial.build(model)
        for step in range(3):
            trial.step_given(model, built, step, micro_batches=micro_batches)
        results.append(snapshot(built))
    different = differences(*results)
    if different:
        trial.fail(
            f"the gradient of {MICRO_BATCHES} micro-batches gives another step than the same gradient of one "
            f"batch: {some(different)} differ. Does the optimizer count backward passes, or hook into them? "
            "Only `step` may look at gradients"
        )


def check_non_finite_gradients(optimizer: str, **settings: Any) -> None:
    """An infinite gradient: in fp32 the step is made, as torch does; in bf16 it is skipped and leaves nothing behind.

    One that is no number shows in the parameter or in its state: whoever looks for it later finds it.

    Args:
        optimizer: registered name.
        **settings: fields of the configuration.

    Raises:
        ConformanceError: an fp32 step is skipped, refused, leaves out parameters whose gradients are finite, or hides a
            NaN; a bf16 step is made, changes parameters, state or settings, or changes a step that follows.
    """
    trial = Trial(optimizer, settings)
    _steps_in_fp32(trial)
    _shows_nan(trial)
    _skips_in_bf16(trial)


def _steps_in_fp32(trial: Trial) -> None:
    before, clean = _second_step(trial, None, clip_grad=0.0)
    _, poisoned = _second_step(trial, _POISONED, clip_grad=0.0)
    _second_step(trial, _POISONED, clip_grad=1.0)
    if get_registry().optimizer(trial.optimizer).granularity is Granularity.GROUP:
        return  # one gradient may reach every parameter of its group
    left_out = [
        name
        for name in clean
        if name != _POISONED
        and not torch.equal(clean[name], before[name])
        and not torch.equal(clean[name], poisoned[name])
    ]
    if left_out:
        trial.fail(
            f"an infinite gradient of {_POISONED!r} changes the step of {some(left_out)}, whose gradients "
            "are finite. In fp32 torch.optim makes such a step; do not skip it yourself"
        )
    if torch.equal(poisoned[_POISONED], before[_POISONED]) and not torch.equal(
        clean[_POISONED], before[_POISONED]
    ):
        trial.fail(
            f"an infinite gradient of {_POISONED!r} in fp32 does not change that parameter. torch.optim "
            "makes such a step; do not skip a parameter yourself"
        )


def _shows_nan(trial: Trial) -> None:
    """Step a matrix one element of whose gradient is NaN."""
    model, built = built_few(trial)
    step_few(model, built, range(1))
    weight = trial.own_params(built).get("weight")
    if weight is None:
        return
    weight.grad = torch.ones_like(weight)
    weight.grad.view(-1)[0] = float("nan")
    model.bias.grad = torch.ones_like(model.bias)
    try:
        built.step()
    except Exception:  # noqa: BLE001 - that is no hiding
        return
    state = [
        kept for key, kept in state_of(built).items() if key.endswith(" of weight") and _is_numbers(kept)
    ]
    if state and all(bool(each.isfinite().all()) for each in (weight.detach(), *state)):
        trial.fail(
            "a gradient with a NaN leaves a parameter and its state finite, so a broken run goes on "
            "unnoticed. Use gradients unchanged; the core looks for values that are not finite"
        )


def _is_numbers(kept: Any) -> bool:
    return isinstance(kept, torch.Tensor) and kept.is_floating_point() and kept.numel() > 1


def _second_step(trial: Trial, poison: str | None, *, clip_grad: float) -> tuple[_Params, _Params]:
    """Return the parameters before and after a second step in fp32."""
    model = trial.model()
    torch.manual_seed(0)
    built = trial.build(model, clip_grad=clip_grad)
    trial.step_given(model, built, 0)
    before = params_of(built)
    try:
        result = trial.step_given(model, built, 1, poison=poison)
    except (ArithmeticError, ValueError, RuntimeError) as error:
        if isinstance(error, MegaoptError) or poison is None:
            raise
        trial.fail(
            f"an infinite gradient in fp32 raises {type(error).__name__}: {error}. Make the step, as "
            "torch.optim does: the core decides which steps are skipped"
        )
    if not result.update_successful:
        trial.fail(
            "update_successful is False after an infinite gradient in fp32; torch.optim makes this step"
        )
    return before, params_of(built)


def _skips_in_bf16(trial: Trial) -> None:
    results = []
    for poisoned in (False, True):
        model = trial.model(dtype=torch.bfloat16)
        torch.manual_seed(0)
        built = trial.build(model, bf16=True)
        trial.step_given(model, built, 0)
        trial.step_given(model, built, 1)
        if poisoned:
            _skip(trial, model, built)
        trial.step_given(model, built, 2)
        results.append(snapshot(built))
    different = differences(*results)
    if different:
        trial.fail(
            f"a step that was skipped for an infinite gradient changes the next step: {some(different)} "
            "differ. Something outside `optimizer.state` remembers the gradient"
        )


def _skip(trial: Trial, model: torch.nn.Module, built: MegatronOptimizer) -> None:
    before = snapshot(built)
    result = trial.step_given(model, built, 7, poison=_POISONED)
    if tuple(result) != (False, None, None):
        trial.fail(
            f"an infinite gradient in bf16 returns {tuple(result)}; a skipped step returns (False, None, None)"
        )
    different = differences(before, snapshot(built))
    if different:
        trial.fail(f"a step that was skipped for an infinite gradient in bf16 changes {some(different)}")
