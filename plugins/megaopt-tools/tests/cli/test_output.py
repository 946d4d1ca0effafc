"""Tables are as wide as the terminal; into a file or pipe they have no limit."""

from megaopt_tools.cli.output import terminal_width


def test_the_width_is_that_of_the_terminal(monkeypatch) -> None:
    """`COLUMNS` says it; a pipe has none."""
    monkeypatch.setenv("COLUMNS", "77")
    assert terminal_width() == 77
    monkeypatch.delenv("COLUMNS")
    monkeypatch.setattr("sys.stdout.isatty", lambda: False)
    assert terminal_width() is None
