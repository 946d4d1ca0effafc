"""Tests of this folder share their helper modules, and the fixtures of the kit."""

import sys
from pathlib import Path

from megaopt_testing.fake_plugins import plugins

__all__ = ["plugins"]

sys.path.insert(0, str(Path(__file__).parent))
