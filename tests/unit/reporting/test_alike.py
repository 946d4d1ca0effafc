"""Repeated layers share a row, and a reason that many rows share stands once."""

import pytest

from megaopt_core.reporting._alike import alike, name_pattern, table_with_reasons


@pytest.mark.parametrize(
    ("name", "pattern"),
    [
        ("layers.0.experts.12.w1", "layers.*.experts.*.w1"),
        ("0.1", "*.*"),
        ("layer1.conv.weight", "layer1.conv.weight"),
        ("weight", "weight"),
    ],
)
def test_only_whole_numbers_between_dots_vary(name, pattern) -> None:
    """A pattern is what an override takes."""
    assert name_pattern(name) == pattern


def test_rows_share_a_pattern_only_when_nothing_else_differs() -> None:
    """Another learning rate is another row."""
    rows = [(f"layers.{i}.w1", 0.1 if i < 2 else 0.2, i) for i in range(3)]
    assert [(group.name, group.members) for group in alike(rows)] == [
        ("layers.*.w1", (0, 1)),
        ("layers.2.w1", (2,)),
    ]


def test_notes_are_wrapped_under_their_number() -> None:
    """Every reason goes below where a table has no room for it."""
    rows = [["x", "one dimension, so it is stepped element by element"], ["y", ""], ["z", "b"]]
    text = table_with_reasons(["name", "why"], rows, 30)
    assert text.splitlines() == [
        "name  why",
        "----  ---",
        "x     [1]",
        "y",
        "z     [2]",
        "",
        "[1] one dimension, so it is",
        "    stepped element by element",
        "[2] b",
    ]
