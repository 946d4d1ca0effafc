"""The command line: `megaopt`, and what plugins' commands are made with."""

from typing import TYPE_CHECKING

from megaopt_core import resolve_lazily

if TYPE_CHECKING:
    from megaopt_core.cli._assignments import add_set_option, parse_assignments
    from megaopt_core.cli._output import print_json, print_table
    from megaopt_core.cli._program import main
else:
    __getattr__, __dir__ = resolve_lazily(
        __name__,
        {
            "add_set_option": "_assignments",
            "main": "_program",
            "parse_assignments": "_assignments",
            "print_json": "_output",
            "print_table": "_output",
        },
    )

__all__ = ["add_set_option", "main", "parse_assignments", "print_json", "print_table"]
