"""Settings that a schedule style has of its own: explained, refused when they cannot be, and heard."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import attrs
import torch

from megaopt_core.errors import ConformanceError, ScheduleError
from megaopt_core.plugin_api import ScheduleStyle
from megaopt_core.schedules import OptimizerParamScheduler
from megaopt_testing.check import Kind, subject
from megaopt_testing.checks.settings import impossible_values
from megaopt_testing.checks.settings_act import other_values

__all__ = ["check_style_settings", "requires_style_settings"]

_STEPS = (1, 5, 10, 15, 19)


def requires_style_settings(style: ScheduleStyle) -> str | None:
    """Return why the check cannot be made of a style, None when it can.

    Args:
        style: the style.
    """
    return "it declares no settings" if style.settings is None else None


def check_style_settings(name: str) -> None:
    """Every setting has help, refuses what cannot be, and bends the curve.

    Args:
        name: the style's name.

    Raises:
        ConformanceError: one is not explained, takes anything, or changes nothing.
    """
    style: ScheduleStyle = subject(Kind.SCHEDULE, name)
    assert style.settings is not None
    usual = _curve(name, style, {})
    for field in attrs.fields(style.settings):
        value = getattr(style.settings(), field.name)
        if not str(field.metadata.get("help", "")).strip():
            raise ConformanceError(
                f'{field.name} has no help: field(..., metadata={{"help": "what it does"}})', optimizer=name
            )
        for values in impossible_values(value):
            if all(_takes(name, style, {field.name: wrong}) for wrong in values):
                raise ConformanceError(
                    f"a scheduler accepts {field.name}={' and '.join(map(repr, values))}; give it a validator, such as "
                    "those in megaopt_core.config",
                    optimizer=name,
                )
        tried = [other for other in _others(field, value) if _takes(name, style, {field.name: other})]
        if tried and all(_curve(name, style, {field.name: other}) == usual for other in tried):
            raise ConformanceError(
                f"{field.name} does nothing: {', '.join(map(repr, tried))} and its default {value!r} give one curve. "
                f"Read `point.settings.{field.name}`",
                optimizer=name,
            )


def _others(field: attrs.Attribute[Any], value: Any) -> Iterator[Any]:
    choices = field.metadata.get("choices", ())
    return other_values(value, tuple(choices() if callable(choices) else choices))


def _takes(name: str, style: ScheduleStyle, given: Mapping[str, Any]) -> bool:
    try:
        _scheduler(name, style, given)
    except ScheduleError:
        return False
    except Exception:  # noqa: BLE001 - it was accepted, and the curve came upon it
        return True
    return True


def _curve(name: str, style: ScheduleStyle, given: Mapping[str, Any]) -> list[tuple[float, float]]:
    scheduler, found = _scheduler(name, style, given), []
    for step in _STEPS:
        scheduler.step(increment=step - scheduler.num_steps)
        group = scheduler.optimizer.param_groups[0]
        found.append((float(group["lr"]), float(group["weight_decay"])))
    return found


def _scheduler(name: str, style: ScheduleStyle, given: Mapping[str, Any]) -> OptimizerParamScheduler:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    serves_lr, serves_wd = style.learning_rate is not None, style.weight_decay is not None
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=1.0,
        min_lr=0.1,
        lr_warmup_steps=0,
        lr_decay_steps=20,
        lr_decay_style=name if serves_lr else "constant",
        start_wd=0.1,
        end_wd=1.0,
        wd_incr_steps=20,
        wd_incr_style=name if serves_wd else "linear",
        lr_style_settings=given if serves_lr else None,
        wd_style_settings=given if serves_wd else None,
        styles={name: style},
    )
