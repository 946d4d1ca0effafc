"""What a step does with tensors that are not its own: gradients are read, parameters written where they are."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from megaopt_core.optimizers import MegatronOptimizer
from megaopt_core.registry import get_registry
from megaopt_testing.long_run import built_few, step_few
from megaopt_testing.snapshot import differences, params_of, same_bits, snapshot
from megaopt_testing.trial import Trial, some

__all__ = [
    "check_gradients_untouched",
    "check_no_gradients",
    "check_state_dtypes",
    "check_this_gradient",
    "check_written_in_place",
]

_OTHERS = (11, 12, 13)
_LARGE = (192, 96)
"""Of a matrix that is larger than any in a small GPT; some keep states of those in less."""
_SIZES = ((1.0, None), (1.0, None), (1e-14, None), (1e6, None), (1.0, "blocks.0.up.weight"))
"""What gradients are multiplied by in each step, and whose has an infinite element."""


def _built(trial: Trial, **needed: Any) -> tuple[nn.Module, MegatronOptimizer]:
    torch.manual_seed(0)
    model = trial.model()
    return model, trial.build(model, **needed)


def check_gradients_untouched(optimizer: str, **settings: Any) -> None:
    """A step reads gradients: they are the same tensors with the same bits afterwards.

    Whoever logs gradients after the step, or accumulates on top of them, sees what the backward pass left; and that is
    what it leaves without an optimizer. It holds for tiny and huge gradients, and for one that is not finite.

    Args:
        optimizer: registered name.
        **settings: fields of the configuration.

    Raises:
        ConformanceError: a gradient is changed, replaced or removed, or the backward pass makes another one.
    """
    trial = Trial(optimizer, settings)
    model, built = _built(trial, clip_grad=0.0)
    for step, (scale, poison) in enumerate(_SIZES):
        built.zero_grad()
        trial.backward(model, step, poison=poison)
        for param in model.parameters():
            param.grad.mul_(scale)  # type: ignore[union-attr] # backward gave one
        grads = {name: (param.grad, param.grad.clone()) for name, param in model.named_parameters()}  # type: ignore[union-attr] # backward gave one
        if scale == 1.0:
            _require_plain(trial, step, {name: grad for name, (_, grad) in grads.items()}, poison)
        built.step()
        changed = [
            name
            for name, param in model.named_parameters()
            if param.grad is not grads[name][0] or not same_bits(param.grad, grads[name][1])
        ]
        if changed:
            trial.fail(
                f"a step changes or removes the gradients of {some(changed)}. Work on a copy "
                "(`param.grad.mul(...)`, not `mul_`), and leave zero_grad() to the caller"
            )


def _require_plain(trial: Trial, step: int, grads: Mapping[str, torch.Tensor], poison: str | None) -> None:
    """Compare gradients with those of a model that has no optimizer."""
    model = trial.model()
    trial.backward(model, step, poison=poison)
    other = [name for name, param in model.named_parameters() if not same_bits(param.grad, grads[name])]
    if other:
        trial.fail(
            f"the optimizer changes the gradients that the backward pass leaves in {some(other)}. Change "
            "copies of them in `step`, and register no hooks"
        )


def check_written_in_place(optimizer: str, **settings: Any) -> None:
    """A step writes into the memory of the parameters that it was given.

    Buffers, views of flat memory and captured graphs hold on to that memory; `param.data = ...` would part from them.
    It goes on from the values that are there: whoever loads other ones between two steps has them.

    Args:
        optimizer: registered name.
        **settings: fields of the configuration.

    Raises:
        ConformanceError: a parameter has other memory after a step, needs no gradient any more, or is taken back from
            what somebody else has written into it.
    """
    trial = Trial(optimizer, settings)
    model, built = _built(trial)
    memory = {name: param.data_ptr() for name, param in model.named_parameters()}
    for step in range(2):
        trial.step_given(model, built, step)
    moved = [name for name, param in model.named_parameters() if param.data_ptr() != memory[name]]
    if moved:
        trial.fail(
            f"a step replaces the memory of {some(moved)}. Write with `param.add_(...)` or "
            "`param.copy_(...)`, never `param.data = ...`"
        )
    frozen = [name for name, param in model.named_parameters() if not param.requires_grad]
    if frozen:
        trial.fail(
            f"a step sets requires_grad of {some(frozen)} to False. Only the caller decides which parameters train"
        )
    _require_taken_over(trial, model, built)


def _require_taken_over(trial: Trial, model: nn.Module, built: MegatronOptimizer) -> None:
    """Write other values into the parameters, and step at learning rate 0, which moves nothing."""
    for group in built.param_groups:
        group["lr"] = 0.0
    left = []
    for factor in (1.0, 0.5):
        with torch.no_grad():
            for param in model.parameters():
                param.mul_(factor)
        built.reload_model_params()
        before = params_of(built)
        trial.step_given(model, built, 2)
        left.append(
            [name for name, value in params_of(built).items() if not torch.equal(value, before[name])]
        )
    taken_back = [name for name in left[1] if name not in left[0]]
    if taken_back:
        trial.fail(
            f"new values were written into {some(taken_back)}, and a step at learning rate 0 writes the old "
            "ones back. Start each step from the values of the parameter"
        )


def check_this_gradient(optimizer: str, **settings: Any) -> None:
    """Every step uses the gradient of that step: with another one each parameter that moves does so otherwise.

    Args:
        optimizer: registered name.
        **settings: fields of the configuration; weight decay is switched off.

    Raises:
        ConformanceError: a parameter's step does not depend on its gradient.
    """
    trial = Trial(optimizer, settings)
    own = trial.own_names(_built(trial)[1])
    for earlier in range(3):
        before, *ends = (
            _after(trial, [*range(earlier), *last])
            for last in ((), (earlier,), *((other,) for other in _OTHERS))
        )
        deaf = [
            name
            for name in own
            if not torch.equal(before[name], ends[0][name])
            and all(torch.equal(ends[0][name], end[name]) for end in ends[1:])
        ]
        if deaf:
            trial.fail(
                f"step {earlier + 1} ignores the gradients of {some(deaf)}. Read `param.grad` in each step, "
                "and not a kept one"
            )


def _after(trial: Trial, steps: list[int]) -> dict[str, torch.Tensor]:
    model, built = _built(trial, weight_decay=0.0)
    for step in steps:
        trial.step_given(model, built, step)
    return params_of(built)


def check_no_gradients(optimizer: str, **settings: Any) -> None:
    """A step without any gradient changes nothing, before the first real step and after it.

    Args:
        optimizer: registered name.
        **settings: fields of the configuration.

    Raises:
        ConformanceError: parameters, state or group settings change.
    """
    trial = Trial(optimizer, settings)
    model, built = _built(trial)
    for when in ("the first step", "a step"):
        built.zero_grad(set_to_none=True)
        before = snapshot(built)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "no parameter has a gradient", UserWarning)
            built.step()
        changed = differences(before, snapshot(built))
        if changed:
            trial.fail(
                f"{when} without gradients changes {some(changed)}; count steps and decay weights only where "
                "there is a gradient"
            )
        trial.step_given(model, built, 0)


def check_state_dtypes(optimizer: str, **settings: Any) -> None:
    """State of float32 parameters is float32, unless the entry declares other dtypes for it.

    It stays so for eight steps, and in a large matrix it is as in small ones. Codes of whole numbers are the
    optimizer's own business, and so is state of another size than its parameter's that is kept in more than float32.

    Args:
        optimizer: registered name.
        **settings: fields of the configuration.

    Raises:
        ConformanceError: a state tensor is of a floating-point dtype that nobody declared.
    """
    trial = Trial(optimizer, settings)
    model, built = _built(trial)
    for step in range(8):
        trial.step_given(model, built, step)
    _require_float32(trial, built)
    large, built = built_few(trial, shape=_LARGE)
    step_few(large, built, range(1))
    _require_float32(trial, built)


def _require_float32(trial: Trial, built: MegatronOptimizer) -> None:
    declared = get_registry().optimizer(trial.optimizer).state_dtypes
    wrong = {
        f"{key!r} ({str(value.dtype).removeprefix('torch.')})"
        for param in trial.own_params(built).values()
        for key, value in built.state[param].items()
        if isinstance(value, torch.Tensor)
        and value.is_floating_point()
        and (
            value.element_size() < 4
            or (value.dtype is not torch.float32 and value.numel() == param.numel() > 1)
        )
        and value.dtype not in declared.get(key, ())
    }
    if wrong:
        trial.fail(
            f"the state {some(sorted(wrong))} of float32 parameters is not kept in float32, and the entry's "
            "`state_dtypes` does not say so"
        )
