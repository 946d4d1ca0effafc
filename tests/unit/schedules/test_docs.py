"""The page about schedules: its examples run, and its table is what the styles give."""

import doctest
import re
from pathlib import Path

import pytest

from megaopt_core.schedules import BUILTIN_STYLES
from megaopt_core.schedules._scheduler_state import _OLD_KEYS
from megaopt_core.schedules._styles import WSD_DECAYS, LearningRatePoint

PAGE = Path(__file__).parents[3] / "docs" / "schedules.md"
STYLES = PAGE.with_name("schedule-styles.md")


def table_below(header: str) -> list[list[str]]:
    """The rows of the table that has this header."""
    lines = PAGE.read_text().split(header)[1].splitlines()[2:]
    rows = lines[: lines.index("")]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


@pytest.mark.parametrize("page", [PAGE, STYLES], ids=lambda page: page.stem)
def test_examples_run(page: Path) -> None:
    """Every pycon block, from top to bottom."""
    result = doctest.testfile(str(page), module_relative=False, optionflags=doctest.ELLIPSIS)
    assert (result.failed, result.attempted > 8) == (0, True)


def test_table_of_values_is_true() -> None:
    """Every number, as the styles compute it."""
    names = ["constant", "linear", "cosine", "inverse-square-root", "WSD"]
    header = "| step | " + " | ".join(f"`{name}`" for name in names) + " |"
    for step, *cells in table_below(header):
        point = LearningRatePoint(
            step=int(step),
            max_lr=1.0,
            min_lr=0.1,
            lr_warmup_steps=10,
            lr_decay_steps=110,
            wsd_decay_steps=50,
            lr_wsd_decay_style="minus_sqrt",
        )
        values = [BUILTIN_STYLES[name].learning_rate_at(point) for name in names]
        assert [float(cell) for cell in cells] == pytest.approx(values, abs=1e-6)


def test_every_name_has_its_row() -> None:
    """No style, final decay or old key is left out."""
    learning = {
        row[0].strip("`")
        for row in table_below("| `lr_decay_style` | learning rate between warm-up and $d$ |")
    }
    weight = {
        row[0].strip("`") for row in table_below("| `wd_incr_style` | weight decay up to `wd_incr_steps` |")
    }
    final = {row[0].strip("`") for row in table_below("| `lr_wsd_decay_style` | $c(q)$ |")}
    assert learning == {name for name, style in BUILTIN_STYLES.items() if style.learning_rate}
    assert weight == {name for name, style in BUILTIN_STYLES.items() if style.weight_decay}
    assert final == set(WSD_DECAYS)
    old = {
        row[0].strip("`"): tuple(re.findall(r"`(\w+)`", row[1]))
        for row in table_below("| today | formerly |")
    }
    assert old == dict(_OLD_KEYS)
