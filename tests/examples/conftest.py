"""Lets the tests here import `pages.py`: test files are not importable by name."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
