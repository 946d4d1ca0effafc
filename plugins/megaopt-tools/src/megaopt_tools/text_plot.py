"""One curve as lines of text."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["draw_curve", "sample_steps"]

_LABEL_WIDTH = 10  # columns to the left of a curve, for the labels of its vertical axis

# Bits of a braille character's eight dots, by column and by row from below.
_DOTS = ((0x40, 0x04, 0x02, 0x01), (0x80, 0x20, 0x10, 0x08))
_BRAILLE = 0x2800
_ASCII = str.maketrans("┤┼└─┬", "|||-+")


def sample_steps(last_step: int, count: int) -> list[int]:
    """Return whole steps from 0 to `last_step`, both included, as evenly spaced as whole steps can be.

    Args:
        last_step: the last step.
        count: how many; at least 2. There are repetitions if it is more than `last_step + 1`.

    Example:
        >>> sample_steps(10, 5)
        [0, 2, 5, 8, 10]
    """
    return [round(index * last_step / (count - 1)) for index in range(count)]


def draw_curve(
    values: Sequence[float], last_step: int, width: int, height: int, *, ascii_only: bool = False
) -> list[str]:
    """Draw values that are evenly spaced over the steps from 0 to `last_step`.

    Args:
        values: two for each column, from left to right.
        last_step: the step of the last value.
        width: columns of the curve, without the labels; odd, so that one of them is the middle, and at
            least 21.
        height: lines of the curve; at least 2.
        ascii_only: draw with ASCII characters in place of braille dots.

    Returns:
        `height + 2` lines: the curve with its vertical axis, then the horizontal axis and its labels.

    Example:
        >>> for line in draw_curve([index / 41 for index in range(42)], 100, 21, 3, ascii_only=True):
        ...     print(line)
                 1 |              *******
                   |       *******
                 0 |*******
                   |+---------+---------+
                    0         50      100
    """
    low, high = min(values), max(values)
    span = high - low
    rows = height * 4
    # A flat curve runs through the middle.
    heights = [round((value - low) / span * (rows - 1)) if span else rows // 2 for value in values]
    cells = [[0] * width for _ in range(height)]
    for index, level in enumerate(heights):
        column, half = divmod(index, 2)
        # Steep parts are joined to the value before, so that the curve has no gaps.
        start = heights[index - 1] if index else level
        step = 1 if start <= level else -1
        for dot in range(start + step if start != level else level, level + step, step):
            line, row = divmod(dot, 4)
            cells[height - 1 - line][column] |= _DOTS[half][row]
    labels = _labels(low, high, height)
    lines = [
        f"{label:>{_LABEL_WIDTH}} ┤{''.join(_glyph(cell, ascii_only) for cell in row)}".rstrip()
        for label, row in zip(labels, cells, strict=True)
    ]
    lines += _horizontal_axis(last_step, width)
    return [line.translate(_ASCII) for line in lines] if ascii_only else lines


def _glyph(cell: int, ascii_only: bool) -> str:
    if not cell:
        return " "
    return "*" if ascii_only else chr(_BRAILLE + cell)


def _labels(low: float, high: float, height: int) -> list[str]:
    labels = [""] * height
    if low == high:
        labels[height - 1 - (height * 4 // 2) // 4] = f"{low:.4g}"
        return labels
    labels[0], labels[-1] = f"{high:.4g}", f"{low:.4g}"
    if height >= 5 and height % 2:
        labels[height // 2] = f"{(low + high) / 2:.4g}"
    return labels


def _horizontal_axis(last_step: int, width: int) -> list[str]:
    marks = (0, width // 2, width - 1)
    axis = "".join("┬" if column in marks else "─" for column in range(width))
    first, middle, last = "0", str(round(last_step * marks[1] / (width - 1))), str(last_step)
    numbers = first.ljust(marks[1]) + middle
    numbers += last.rjust(width - len(numbers))
    return [f"{'':{_LABEL_WIDTH}} └{axis}", f"{'':{_LABEL_WIDTH}}  {numbers}"]
