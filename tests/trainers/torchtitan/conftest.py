"""Ranks are forked from a server that has imported torchtitan, which takes many seconds, after its shims."""

import os
import sys
from pathlib import Path

import warm

FOLDER = str(Path(__file__).parent)
sys.path.insert(0, FOLDER)
# The server of older Pythons does not get `sys.path`.
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (FOLDER, os.environ.get("PYTHONPATH"))))

warm.OTHERS += ["titan_on_cpu", "titan_harness"]
warm.PACKAGES.append("trainers")
