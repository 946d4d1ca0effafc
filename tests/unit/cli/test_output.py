"""Tables are as wide as the terminal at most, and break words only where nothing else helps."""

import pytest

from megaopt_core.cli._output import terminal_width, wrapped_table

HEADER = ["name", "why"]
ROWS = [["layers.0.norm.weight", "one dimension, so it is stepped element by element"], ["b", ""]]


def test_without_a_limit_nothing_is_wrapped() -> None:
    """Output into a file or pipe keeps one line a row."""
    assert wrapped_table(HEADER, ROWS, width=None).splitlines() == [
        "name                  why",
        "--------------------  --------------------------------------------------",
        "layers.0.norm.weight  one dimension, so it is stepped element by element",
        "b",
    ]


def test_text_is_wrapped_before_names_are_broken() -> None:
    """A name can be copied as long as there is room for it."""
    assert wrapped_table(HEADER, ROWS, width=40).splitlines() == [
        "name                  why",
        "--------------------  ------------------",
        "layers.0.norm.weight  one dimension, so",
        "                      it is stepped",
        "                      element by element",
        "b",
    ]


@pytest.mark.parametrize("width", [22, 30, 44, 60, 200])
def test_no_line_is_longer_than_the_width(width) -> None:
    """Down to ten letters a column."""
    lines = wrapped_table(HEADER, ROWS, width=width).splitlines()
    assert max(len(line) for line in lines) <= width
    assert "".join("".join(line[:10].split()) for line in lines[2:-1]).startswith("layers.0")


def test_numbers_are_aligned_to_the_right() -> None:
    """Where the caller says so."""
    assert wrapped_table(["n", "what"], [[1, "a"], [100, "b"]], width=80, right=["n"]).splitlines() == [
        "  n  what",
        "---  ----",
        "  1  a",
        "100  b",
    ]


def test_the_width_is_that_of_the_terminal(monkeypatch) -> None:
    """`COLUMNS` says it; a pipe has none."""
    monkeypatch.setenv("COLUMNS", "77")
    assert terminal_width() == 77
    monkeypatch.delenv("COLUMNS")
    monkeypatch.setattr("sys.stdout.isatty", lambda: False)
    assert terminal_width() is None
