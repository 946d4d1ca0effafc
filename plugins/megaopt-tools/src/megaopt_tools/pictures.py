"""The pictures: one run's loss, and several runs beside each other."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megaopt_tools.training import RunResult

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["draw_comparison", "draw_loss", "smooth"]

_COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
"""Okabe and Ito's palette: told apart with every kind of colour blindness."""
_DASHES = ("-", "--", "-.", ":")
_INK, _FAINT = "#333333", "#bbbbbb"


def smooth(values: Sequence[float], window: float) -> list[float]:
    """Return the exponential moving average, corrected for its beginning.

    `m_t = sum_i beta^(t-i) x_i / sum_i beta^(t-i)` with `beta = 1 - 1/window`.

    Args:
        values: one a step.
        window: steps over which it averages.

    Example:
        >>> smooth([2.0, 2.0, 2.0], window=10)
        [2.0, 2.0, 2.0]
    """
    beta = 1 - 1 / window
    total = weight = 0.0
    averages = []
    for value in values:
        total, weight = beta * total + value, beta * weight + 1
        averages.append(total / weight)
    return averages


def draw_loss(result: RunResult, path: Path) -> None:
    """Draw the loss of one run over its steps, with what came out on the held-out text.

    Args:
        result: the run.
        path: the file; its ending names the format.
    """
    figure = _figure(7.0, 4.2)
    axes = figure.subplots()
    steps, bits = _curve(result)
    axes.plot(steps, bits, color=_COLORS[0], alpha=0.25, linewidth=0.8)
    axes.plot(steps, smooth(bits, _window(bits)), color=_COLORS[0], linewidth=2, label="training, smoothed")
    if result.val_bits_per_byte is not None:
        label = f"held-out text: {result.val_bits_per_byte:.3f}"
        axes.axhline(result.val_bits_per_byte, color=_COLORS[1], linewidth=1.5, linestyle="--", label=label)
    axes.legend(frameon=False)
    _dress(axes, f"{result.recipe.optimizer}, learning rate {result.peak_lr:.3g}")
    figure.savefig(path, dpi=150)


def draw_comparison(results: Sequence[RunResult], path: Path) -> None:
    """Draw the losses of several runs over their steps, beside bars of what came out on the held-out text.

    Args:
        results: the runs, on the same text.
        path: the file; its ending names the format.
    """
    figure = _figure(10.0, 4.6)
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    for index, result in enumerate(results):
        color, dashes = _COLORS[index % len(_COLORS)], _DASHES[index % len(_DASHES)]
        steps, bits = _curve(result)
        left.plot(steps, bits, color=color, alpha=0.2, linewidth=0.7)
        label = f"{result.recipe.optimizer}, learning rate {result.peak_lr:.3g}"
        left.plot(steps, smooth(bits, _window(bits)), color=color, linewidth=2, linestyle=dashes, label=label)
    left.legend(frameon=False)
    _dress(left, "training text")
    _bars(right, results)
    text = results[0].text
    figure.suptitle(
        f"{results[0].parameters / 1e6:.2f} M parameter GPT on {text.source}, {results[0].recipe.steps} steps, "
        f"seed {results[0].recipe.seed}",
        x=0.01,
        ha="left",
        fontsize=11,
        color=_INK,
    )
    figure.savefig(path, dpi=150)


def _figure(width: float, height: float) -> Figure:
    from matplotlib.figure import Figure  # pyplot would choose a backend and keep the figure

    return Figure(figsize=(width, height), layout="constrained")


def _curve(result: RunResult) -> tuple[list[int], list[float]]:
    finite = [record for record in result.records if math.isfinite(record.loss)]
    return [record.step for record in finite], [record.loss / math.log(2) for record in finite]


def _window(values: Sequence[float]) -> float:
    """Average over ten steps, over fewer in a run that is short."""
    return min(10.0, max(1.0, len(values) / 20))


def _dress(axes: Axes, title: str) -> None:
    axes.set_title(title, loc="left", fontsize=10, color=_INK)
    axes.set_xlabel("step", color=_INK)
    axes.set_ylabel("bits per byte", color=_INK)
    axes.grid(axis="y", color=_FAINT, linewidth=0.5)
    _clean(axes)


def _clean(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(_FAINT)
    axes.tick_params(colors=_INK, labelsize=9)


def _bars(axes: Axes, results: Sequence[RunResult]) -> None:
    """Draw horizontal bars with their numbers; a run that diverged has none."""
    names = [result.recipe.optimizer for result in results]
    values = [result.val_bits_per_byte for result in results]
    for index, value in enumerate(values):
        axes.barh(index, value or 0.0, color=_COLORS[index % len(_COLORS)], height=0.4)
        shown = f" {value:.3f}" if value is not None else f" diverged at step {results[index].diverged_at}"
        axes.text(value or 0.0, index, shown, va="center", ha="left", fontsize=11, color=_INK)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.25 * max((value for value in values if value is not None), default=1.0))
    axes.set_title("held-out text: bits per byte, lower is better", loc="left", fontsize=10, color=_INK)
    axes.set_xticks([])
    _clean(axes)
    axes.spines["bottom"].set_visible(False)
    axes.tick_params(axis="y", length=0, labelsize=11)
