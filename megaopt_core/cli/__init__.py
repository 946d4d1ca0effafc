"""The command line: `megaopt`, and what plugins' commands are made with."""

from megaopt_core.cli._arguments import add_set_option, parse_assignments
from megaopt_core.cli._output import print_json, print_table, terminal_width
from megaopt_core.cli._parser import examples
from megaopt_core.cli._program import build_parser, main

__all__ = [
    "add_set_option",
    "build_parser",
    "examples",
    "main",
    "parse_assignments",
    "print_json",
    "print_table",
    "terminal_width",
]
