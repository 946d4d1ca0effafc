"""Schedules: whoever writes into the groups decides what the next step uses."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from megaopt_core.optimizers import MegatronOptimizer
from megaopt_core.params import ParamGroupOverride, ParamKey
from megaopt_core.schedules import OptimizerParamScheduler
from megaopt_testing.snapshot import params_of
from megaopt_testing.trial import DEFAULT_SETTINGS, Trial, some

__all__ = ["check_one_schedule"]

_SCHEDULED = ("lr", "weight_decay")


def check_one_schedule(optimizer: str, **settings: Any) -> None:
    """One schedule moves every group, and inner optimizers step with what it says.

    It holds for megaopt's `OptimizerParamScheduler` and for torch's `LambdaLR`, in a model with groups of different
    learning rates. At learning rate zero nothing moves.

    Args:
        optimizer: registered name.
        **settings: fields of the configuration.

    Raises:
        ConformanceError: a group is not scheduled, an inner group sees something else, a step changes what was
            scheduled, or a parameter moves at learning rate zero.
    """
    trial = Trial(optimizer, settings)
    _megaopt_schedule(trial)
    _torch_schedule(trial)


def _build(trial: Trial) -> tuple[nn.Module, MegatronOptimizer]:
    lr = trial.settings.get("lr", DEFAULT_SETTINGS["lr"])
    half = {ParamKey(name="blocks.0.*"): ParamGroupOverride(max_lr=lr / 2, wd_mult=0.5)}
    torch.manual_seed(0)
    model = trial.model()
    return model, trial.build(model, overrides=half)


def _megaopt_schedule(trial: Trial) -> None:
    model, built = _build(trial)
    lr = max(group["max_lr"] for group in built.param_groups)
    scheduler = OptimizerParamScheduler(
        built,
        init_lr=0.0,
        max_lr=lr,
        min_lr=0.0,
        lr_warmup_steps=2,
        lr_decay_steps=6,
        lr_decay_style="linear",
        start_wd=0.0,
        end_wd=0.1,
        wd_incr_steps=5,
        wd_incr_style="linear",
    )
    _require_still(trial, model, built)
    for step in range(1, 6):
        scheduler.step(increment=1)
        fraction = step / 2 if step <= 2 else (6 - step) / 4
        expected = [
            {"lr": fraction * group["max_lr"], "weight_decay": 0.02 * step * group["wd_mult"]}
            for group in built.param_groups
        ]
        _require_seen(trial, model, built, expected, "OptimizerParamScheduler")
    scheduler.step(increment=1)
    _require_still(trial, model, built)


def _torch_schedule(trial: Trial) -> None:
    model, built = _build(trial)
    decay = [group["weight_decay"] for group in built.param_groups]
    base = [group["lr"] for group in built.param_groups]
    scheduler = torch.optim.lr_scheduler.LambdaLR(built, lambda step: (4 - step) / 4)
    for step in range(4):
        expected = [
            {"lr": lr * (4 - step) / 4, "weight_decay": wd} for lr, wd in zip(base, decay, strict=True)
        ]
        _require_seen(trial, model, built, expected, "torch's LambdaLR")
        scheduler.step()
    _require_still(trial, model, built)


def _require_seen(
    trial: Trial, model: nn.Module, built: MegatronOptimizer, expected: list[dict[str, float]], scheduler: str
) -> None:
    """Step once, and compare what inner groups hold then with what was scheduled."""
    groups_of: dict[int, list[dict[str, float]]] = {}

    def look(inner: torch.optim.Optimizer, *_: Any) -> None:
        # A class that calls its base class's step fires this twice.
        groups_of[id(inner)] = [
            {key: float(group[key]) for key in _SCHEDULED if key in group} for group in inner.param_groups
        ]

    handles = [part.inner.register_step_pre_hook(look) for part in built.parts]
    trial.step_given(model, built, 0)
    for handle in handles:
        handle.remove()
    seen = [group for part in built.parts for group in groups_of.get(id(part.inner), [])]
    if len(seen) != len(expected):
        trial.fail(
            f"its inner optimizers have {len(seen)} groups, but {len(expected)} are scheduled; keep "
            "param_groups as given"
        )
    for index, (inside, wanted) in enumerate(zip(seen, expected, strict=True)):
        outside = {key: float(built.param_groups[index][key]) for key in inside}
        for key, value in inside.items():
            if abs(value - wanted[key]) > 1e-9:
                trial.fail(
                    f"{scheduler} sets {key}={wanted[key]:.6g} in group {index}, but its inner optimizer "
                    f"steps with {value:.6g}"
                )
            if abs(outside[key] - wanted[key]) > 1e-9:
                trial.fail(
                    f"a step changes {key} of group {index} from {wanted[key]:.6g} to {outside[key]:.6g}; "
                    "only schedules write it"
                )


def _require_still(trial: Trial, model: nn.Module, built: MegatronOptimizer) -> None:
    before = params_of(built)
    trial.step_given(model, built, 0)
    moved = [name for name, value in params_of(built).items() if not torch.equal(value, before[name])]
    if moved:
        trial.fail(
            f"the schedule gives learning rate 0, but a step moves {some(moved)}. Read `group['lr']` in "
            "every step; the constructor gives only its first value. Slow weights and averages must not "
            "move the parameter at learning rate 0 either"
        )
