"""The command `megaopt schedule`: learning rate and weight decay over the steps, as text or JSON."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from collections.abc import Callable, Mapping
from shutil import get_terminal_size
from typing import Any, TextIO

from attrs import frozen

from megaopt_core.config import parse_assignments
from megaopt_core.errors import MegaoptError
from megaopt_core.reporting import format_table
from megaopt_core.schedules import OptimizerParamScheduler
from megaopt_tools.errors import CommandError
from megaopt_tools.text_plot import draw_curve, sample_steps

__all__ = ["ScheduleSamples", "run_schedule", "sample_schedule", "scheduler_from"]

_WIDTH, _HEIGHT, _FLAT_HEIGHT = 65, 9, 3
_FINE = 1001  # points of a picture
_BESIDE = 15  # the axis and its numbers
_WSD_STYLE = "exponential"
_WITHOUT_WSD = ("constant", "linear", "cosine", "inverse-square-root")
"""Styles of the core that read no setting of the final decay; a plugin's may."""


class _OneGroup:
    """Stands in for an optimizer: one parameter group and nothing else."""

    def __init__(self) -> None:
        self.param_groups: list[dict[str, Any]] = [{}]


@frozen
class ScheduleSamples:
    """A schedule's values at some steps.

    Args:
        settings: the scheduler's settings, by name.
        steps: the steps, ascending.
        learning_rates: the learning rate at each step.
        weight_decays: weight decay at each step.
    """

    settings: Mapping[str, Any]
    steps: tuple[int, ...]
    learning_rates: tuple[float, ...]
    weight_decays: tuple[float, ...]


type DrawPng = Callable[[ScheduleSamples, str], None]


def scheduler_from(args: Namespace) -> OptimizerParamScheduler:
    """Return the scheduler that the options describe, for one parameter group without values of its own.

    Args:
        args: what a parser with :func:`add_schedule_arguments` parsed.

    Raises:
        CommandError: an option of style WSD is given with another of the schedules that are built in.
        ScheduleError: the options contradict each other.
    """
    _require_wsd(args)
    end_wd = args.wd if args.end_wd is None else args.end_wd
    return OptimizerParamScheduler(
        _OneGroup(),
        init_lr=args.init_lr,
        max_lr=args.lr,
        min_lr=args.min_lr,
        lr_warmup_steps=args.warmup_steps,
        lr_decay_steps=args.decay_steps,
        lr_decay_style=args.style,
        start_wd=args.wd,
        end_wd=end_wd,
        wd_incr_steps=args.decay_steps if args.wd_steps is None else args.wd_steps,
        wd_incr_style=args.wd_style or ("constant" if args.end_wd is None else "linear"),
        wsd_decay_steps=args.wsd_decay_steps,
        lr_wsd_decay_style=args.wsd_style or _WSD_STYLE,
        lr_style_settings=parse_assignments(args.style_set),
    )


def _require_wsd(args: Namespace) -> None:
    if args.style not in _WITHOUT_WSD:
        return
    for option, value in (("--wsd-decay-steps", args.wsd_decay_steps), ("--wsd-style", args.wsd_style)):
        if value is not None:
            raise CommandError(f"{option} {value}: --style {args.style} does not read it; --style WSD does")


def sample_schedule(scheduler: OptimizerParamScheduler, count: int) -> ScheduleSamples:
    """Return a schedule's values at evenly spaced steps, from 0 to the end of decay and increments.

    Args:
        scheduler: the scheduler; it is left as it was.
        count: how many steps; at least 2. Short schedules repeat some, for a step is a whole number.
    """
    settings = scheduler.state_dict()
    before = settings.pop("num_steps")
    steps = sample_steps(int(max(scheduler.lr_decay_steps, scheduler.wd_incr_steps)), count)
    learning_rates, weight_decays = [], []
    try:
        for step in steps:
            scheduler.num_steps = step
            learning_rates.append(scheduler.get_lr({}))
            weight_decays.append(scheduler.get_wd())
    finally:
        scheduler.num_steps = before
    return ScheduleSamples(settings, tuple(steps), tuple(learning_rates), tuple(weight_decays))


def run_schedule(args: Namespace) -> int:
    """Print the schedule that the options describe; return the command's exit status.

    A plugin that can draw pictures sets the default `draw_png` on the command's parser, a function of
    :class:`ScheduleSamples` and the file name: `commands.choices["schedule"].set_defaults(draw_png=...)`.

    Args:
        args: what a parser with :func:`add_schedule_arguments` parsed.
    """
    draw_png: DrawPng | None = getattr(args, "draw_png", None)
    if args.png and draw_png is None:
        sys.stderr.write("megaopt schedule: --png needs megaopt-tools: pip install megaopt-tools\n")
        return 2
    try:
        scheduler = scheduler_from(args)
        points = sample_schedule(scheduler, args.points)
        curve = sample_schedule(scheduler, 2 * _width())
        if args.png and draw_png is not None:
            draw_png(sample_schedule(scheduler, _FINE), args.png)
    except MegaoptError as error:
        sys.stderr.write(f"megaopt schedule: {error}\n")
        return 2
    except OSError as error:
        sys.stderr.write(f"megaopt schedule: cannot write {args.png}: {error.strerror or error}\n")
        return 2
    if args.json:
        sys.stdout.write(json.dumps(_as_json(points), indent=2) + "\n")
    else:
        sys.stdout.write(_as_text(points, curve, ascii_only=not _shows_braille(sys.stdout)) + "\n")
        if args.png:
            sys.stdout.write(f"\nwrote {args.png}\n")
    return 0


def _shows_braille(stream: TextIO) -> bool:
    return (stream.encoding or "").lower().replace("-", "") == "utf8"


def _rows(points: ScheduleSamples) -> list[tuple[int, float, float]]:
    rows = zip(points.steps, points.learning_rates, points.weight_decays, strict=True)
    return list(dict.fromkeys(rows))


def _as_json(points: ScheduleSamples) -> dict[str, Any]:
    names = ("step", "learning_rate", "weight_decay")
    return {
        "settings": dict(points.settings),
        "points": [dict(zip(names, row, strict=True)) for row in _rows(points)],
    }


def _as_text(points: ScheduleSamples, curve: ScheduleSamples, *, ascii_only: bool) -> str:
    settings = points.settings
    own = ", ".join(f"{name}={value}" for name, value in settings.get("lr_style_settings", {}).items())
    told = settings["lr_wsd_decay_style"] if settings["lr_decay_style"] == "WSD" else own
    table = format_table(
        ["step", "learning rate", "weight decay"],
        [(step, f"{lr:.6g}", f"{wd:.6g}") for step, lr, wd in _rows(points)],
        right=["step", "learning rate", "weight decay"],
    )
    sections = [
        f"learning rate: {settings['lr_decay_style']}" + (f" ({told})" if told else ""),
        *_curve(curve.learning_rates, curve.steps[-1], ascii_only=ascii_only),
        "",
        f"weight decay: {settings['wd_incr_style']}",
        *_curve(curve.weight_decays, curve.steps[-1], ascii_only=ascii_only),
        "",
        table,
    ]
    return "\n".join(sections)


def _width() -> int:
    return max(min(_WIDTH, get_terminal_size().columns - _BESIDE), 20)


def _curve(values: tuple[float, ...], last_step: int, *, ascii_only: bool) -> list[str]:
    height = _HEIGHT if min(values) < max(values) else _FLAT_HEIGHT
    return draw_curve(values, last_step, _width(), height, ascii_only=ascii_only)
