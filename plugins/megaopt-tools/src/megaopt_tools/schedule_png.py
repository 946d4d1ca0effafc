"""The picture of `megaopt schedule --png FILE`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from megaopt_core.plugin_api import Commands
from megaopt_tools.errors import CommandError

if TYPE_CHECKING:
    from megaopt_tools.schedule_chart import ScheduleSamples

__all__ = ["draw_schedule_png", "offer_schedule_png"]


def draw_schedule_png(samples: ScheduleSamples, path: str) -> None:
    """Draw learning rate and weight decay over the steps, one below the other, into a file.

    Args:
        samples: the schedule's values.
        path: the file; its ending names the format, PNG where it has none.

    Raises:
        CommandError: the ending names no format of pictures.
        OSError: the file cannot be written.

    Example:
        >>> import os, tempfile
        >>> from megaopt_tools.schedule_chart import ScheduleSamples
        >>> settings = {"lr_decay_style": "linear", "wd_incr_style": "constant"}
        >>> samples = ScheduleSamples(settings, (0, 10), (0.1, 0.0), (0.01, 0.01))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     draw_schedule_png(samples, f"{folder}/schedule.png")
        ...     os.listdir(folder)
        ['schedule.png']
    """
    from matplotlib.figure import Figure  # pyplot would choose a backend and keep the figure

    figure = Figure(figsize=(7.5, 5.0), layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    wsd = samples.settings.get("lr_wsd_decay_style") if samples.settings["lr_decay_style"] == "WSD" else None
    style = samples.settings["lr_decay_style"] + (f" ({wsd})" if wsd else "")
    panels = (
        (upper, samples.learning_rates, f"learning rate: {style}", "tab:blue"),
        (lower, samples.weight_decays, f"weight decay: {samples.settings['wd_incr_style']}", "tab:orange"),
    )
    for axes, values, title, color in panels:
        axes.plot(samples.steps, values, color=color)
        axes.set_title(title, loc="left", fontsize=10)
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_ylim(bottom=0)
        axes.margins(x=0)
    lower.set_xlabel("step")
    kind = Path(path).suffix.removeprefix(".").lower() or "png"
    known = figure.canvas.get_supported_filetypes()
    if kind not in known:
        raise CommandError(f"--png {path}: pictures are written as {', '.join(sorted(known))}, not as {kind}")
    figure.savefig(path, dpi=120, format=kind)


def offer_schedule_png(commands: Commands) -> None:
    """Give the core's command `schedule` the function that draws its picture.

    Args:
        commands: what the hook `megaopt_commands` is given.
    """
    schedule = commands.choices.get("schedule")
    if schedule is not None:
        schedule.set_defaults(draw_png=draw_schedule_png)
