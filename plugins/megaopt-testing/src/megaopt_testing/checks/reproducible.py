"""The same run again: from a checkpoint, and from the same seed."""

from __future__ import annotations

import io
import pickle
from typing import Any

import torch
from torch import nn

from megaopt_core.optimizers import MegatronOptimizer
from megaopt_core.schedules import OptimizerParamScheduler
from megaopt_testing.long_run import LONG, built_few, step_few
from megaopt_testing.snapshot import differences, snapshot
from megaopt_testing.trial import Trial, some

__all__ = ["check_bit_exact_resume", "check_deterministic"]

_HALF = 5


def _scheduler(optimizer: MegatronOptimizer) -> OptimizerParamScheduler:
    top = max(group["max_lr"] for group in optimizer.param_groups)
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=top,
        min_lr=0.1 * top,
        lr_warmup_steps=2,
        lr_decay_steps=2 * _HALF,
        lr_decay_style="cosine",
        start_wd=0.01,
        end_wd=0.1,
        wd_incr_steps=2 * _HALF,
        wd_incr_style="linear",
    )


def _run(
    trial: Trial,
    model: nn.Module,
    optimizer: MegatronOptimizer,
    scheduler: OptimizerParamScheduler,
    steps: range,
) -> None:
    for step in steps:
        trial.train_step(model, optimizer, step)
        scheduler.step(increment=1)


def check_bit_exact_resume(optimizer: str, **settings: Any) -> None:
    """Five steps, saved, loaded into a new optimizer, and five more give the bits of ten steps; in fp32 and in bf16.

    Model, optimizer, learning-rate schedule and random state go through `torch.save` and
    `torch.load(weights_only=True)`. So do sixty steps and sixty more of a small model, for what is done only now and
    then.

    Args:
        optimizer: registered name.
        **settings: fields of the configuration.

    Raises:
        ConformanceError: a parameter, state or a group's settings differ, or the state cannot be saved.
    """
    trial = Trial(optimizer, settings)
    _resume(trial, torch.float32, {})
    _resume(trial, torch.bfloat16, {"bf16": True})
    _resume_late(trial)


def _resume(trial: Trial, dtype: torch.dtype, needed: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = trial.model(dtype=dtype)
    through = trial.build(model, **needed)
    scheduler = _scheduler(through)
    _run(trial, model, through, scheduler, range(_HALF))
    saved = io.BytesIO()
    everything = {
        "model": model.state_dict(),
        "optimizer": through.state_dict(),
        "scheduler": scheduler.state_dict(),
        "random": torch.get_rng_state(),
    }
    try:
        torch.save(everything, saved)
        _run(trial, model, through, scheduler, range(_HALF, 2 * _HALF))
        saved.seek(0)
        loaded = torch.load(saved, weights_only=True)
    except (pickle.PicklingError, pickle.UnpicklingError, TypeError, AttributeError) as error:
        trial.fail(
            f"torch.save and torch.load(weights_only=True) fail for its state: {error}. Keep only tensors, "
            "numbers, strings and containers of them in `optimizer.state`"
        )
    fresh = trial.model(seed=1, dtype=dtype)
    resumed = trial.build(fresh, **needed)
    again = _scheduler(resumed)
    fresh.load_state_dict(loaded["model"])
    resumed.load_state_dict(loaded["optimizer"])
    again.load_state_dict(loaded["scheduler"])
    torch.set_rng_state(loaded["random"])
    _run(trial, fresh, resumed, again, range(_HALF, 2 * _HALF))
    different = differences(snapshot(through), snapshot(resumed))
    if different:
        trial.fail(
            f"{_HALF} + {_HALF} steps with a checkpoint between them do not equal {2 * _HALF} steps "
            f"({dtype}): {some(different)} differ. Keep everything that a step remembers in "
            "`optimizer.state` or in the group, not in attributes"
        )


def _resume_late(trial: Trial) -> None:
    model, through = built_few(trial)
    step_few(model, through, range(LONG // 2))
    saved = io.BytesIO()
    torch.save([model.state_dict(), through.state_dict(), torch.get_rng_state()], saved)
    step_few(model, through, range(LONG // 2, LONG))
    saved.seek(0)
    of_model, of_optimizer, chance = torch.load(saved, weights_only=True)
    fresh, resumed = built_few(trial, seed=1)
    fresh.load_state_dict(of_model)
    resumed.load_state_dict(of_optimizer)
    torch.set_rng_state(chance)
    step_few(fresh, resumed, range(LONG // 2, LONG))
    different = differences(snapshot(through), snapshot(resumed))
    if different:
        trial.fail(
            f"{LONG // 2} + {LONG // 2} steps with a checkpoint between them do not equal {LONG} steps: "
            f"{some(different)} differ. Keep everything that counts steps in `optimizer.state` or in the "
            "group, not in attributes"
        )


def check_deterministic(optimizer: str, **settings: Any) -> None:
    """The same seed gives the same bits, twice in one process.

    Args:
        optimizer: registered name.
        **settings: fields of the configuration.

    Raises:
        ConformanceError: a parameter, state or a group's settings differ after five steps.
    """
    trial = Trial(optimizer, settings)
    results = []
    for _ in range(2):
        torch.manual_seed(0)
        model = trial.model()
        built = trial.build(model)
        for step in range(_HALF):
            trial.train_step(model, built, step)
        results.append(snapshot(built))
    different = differences(*results)
    if different:
        trial.fail(
            f"two runs from one seed differ in {some(different)}. Draw random numbers from torch's default "
            "generator, and keep nothing in the class or the module"
        )
