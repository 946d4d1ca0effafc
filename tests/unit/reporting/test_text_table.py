"""Tables are aligned and as wide as asked at most; a name is broken only where nothing else helps, and after a dot."""

import pytest

from megaopt_core.reporting import format_table

HEADER = ["name", "why"]
ROWS = [["layers.0.norm.weight", "one dimension, so it is stepped element by element"], ["b", ""]]


def test_without_a_limit_nothing_is_wrapped() -> None:
    """Output into a file or pipe keeps one line a row."""
    assert format_table(HEADER, ROWS, width=None).splitlines() == [
        "name                  why",
        "--------------------  --------------------------------------------------",
        "layers.0.norm.weight  one dimension, so it is stepped element by element",
        "b",
    ]


def test_text_is_wrapped_before_names_are_broken() -> None:
    """A name can be copied as long as there is room for it."""
    assert format_table(HEADER, ROWS, width=40).splitlines() == [
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
    lines = format_table(HEADER, ROWS, width=width).splitlines()
    assert max(len(line) for line in lines) <= width
    first = [line[: len(lines[1].split()[0])].strip() for line in lines[2:-1]]
    assert "".join(first) == "layers.0.norm.weight"
    assert all(part.endswith((".", "weight")) or not part for part in first)


def test_what_has_no_dots_is_cut_where_it_must() -> None:
    """A wider table would be worse than a cut name."""
    assert format_table(["name", "n"], [["a" * 25, 1]], width=14).splitlines()[2:] == [
        "aaaaaaaaaaa  1",
        "aaaaaaaaaaa",
        "aaa",
    ]


def test_columns_are_aligned_left_or_right() -> None:
    """Numbers can stand to the right."""
    table = format_table(["name", "lr", "why"], [["a", 0.5, "x"], ["bcdef", 10, "y z"]], right=["lr"])
    assert table.splitlines() == [
        "name    lr  why",
        "-----  ---  ---",
        "a      0.5  x",
        "bcdef   10  y z",
    ]


def test_no_rows_leave_a_header() -> None:
    """An empty table still tells its columns."""
    assert format_table(["a", "b"], []) == "a  b\n-  -"
