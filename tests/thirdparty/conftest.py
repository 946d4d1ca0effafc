"""The distributions in this folder are no part of megaopt: tests install them and run them from there."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "distributed"))
sys.path.insert(0, str(Path(__file__).parent))

from installing import install_wheel
from launch import launch as start

collect_ignore = ["megaopt-rows", "megaopt-signum", "megaopt-strategies"]


@pytest.fixture(scope="session")
def launch() -> Callable[..., list[Any]]:
    """Run a function of the test's file on several ranks; see `tests/distributed/launch.py`."""
    return start


@pytest.fixture(scope="session")
def strategies(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder in which `megaopt-strategies` is installed."""
    pytest.importorskip("setuptools")
    folder = tmp_path_factory.mktemp("strategies")
    install_wheel(Path(__file__).with_name("megaopt-strategies"), folder / "installed")
    return str(folder / "installed")
