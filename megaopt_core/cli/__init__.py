"""The command line: `megaopt`, and what plugins' commands are made with."""

import warnings

with warnings.catch_warnings():
    # Torch tells of a missing numpy at its own import; no command of ours needs numpy.
    warnings.filterwarnings("ignore", message="Failed to initialize NumPy", category=UserWarning)
    import torch as _torch  # noqa: F401 - imported here so that the modules below find it

from megaopt_core.cli._assignments import add_set_option, parse_assignments
from megaopt_core.cli._output import print_json, print_table
from megaopt_core.cli._program import main

__all__ = ["add_set_option", "main", "parse_assignments", "print_json", "print_table"]
