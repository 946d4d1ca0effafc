"""Plugins that a test makes up, installed into a folder of its own."""

import sys
from pathlib import Path

from megaopt_testing.fake_plugins import plugins

__all__ = ["plugins"]

# Modules beside this one import each other, whichever is collected first.
sys.path.insert(0, str(Path(__file__).parent))
