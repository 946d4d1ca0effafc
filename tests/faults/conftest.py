"""Scripts of this folder import what lies beside them, by name."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
