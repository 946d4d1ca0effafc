"""Tables are aligned, and clipped in their last column alone."""

from megaopt_core.reporting import format_table


def test_columns_are_aligned_left_or_right():
    """Numbers can stand to the right."""
    table = format_table(["name", "lr", "why"], [["a", 0.5, "x"], ["bcdef", 10, "y z"]], right=["lr"])
    assert table.splitlines() == [
        "name    lr  why",
        "-----  ---  ---",
        "a      0.5  x",
        "bcdef   10  y z",
    ]


def test_the_last_column_is_clipped_to_the_width():
    """An ellipsis shows that there is more."""
    table = format_table(["a", "why"], [["x", "a long reason"]], width=10)
    assert table.splitlines()[-1] == "x  a long…"


def test_no_rows_leave_a_header():
    """An empty table still tells its columns."""
    assert format_table(["a", "b"], []) == "a  b\n-  -"
