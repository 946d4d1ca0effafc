"""Settings of every test run."""

import contextlib
import doctest
import os
import random
import re
import sys
import zlib
from collections.abc import Iterator
from importlib.metadata import distributions
from pathlib import Path

import pytest
import torch

from megaopt_core.errors import PluginNotInstalledError

sys.path.insert(0, str(Path(__file__).with_name("tests")))

from leftovers import watch

# No process that a test starts outlives the run.
watch()

# One thread, so that the test processes of a small machine do not fight.
torch.set_num_threads(1)

# What a command prints does not depend on the terminal that runs the tests.
os.environ.pop("COLUMNS", None)

ANY_PYTHON = re.compile(r"^pytestmark = .*\bany_python\b", re.MULTILINE)

LONG = os.environ.get("MEGAOPT_TESTS") == "long"

# Plain `tox` says the same twice; long runs look where nobody has looked. A slow machine is no failure.
with contextlib.suppress(ImportError):
    from hypothesis import HealthCheck, settings

    patient = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.register_profile("repeatable", patient, derandomize=True)
    settings.register_profile("random", patient, derandomize=False)
    settings.load_profile("random" if LONG else "repeatable")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Import no file all of whose tests are left out: on another Python these are more than half."""
    if config.option.markexpr != "not any_python" or not collection_path.match("test_*.py"):
        return None
    return True if ANY_PYTHON.search(collection_path.read_text()) else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave the long runs to `tox run -e long`."""
    if LONG:
        return
    left = [item for item in items if item.get_closest_marker("long")]
    if left:
        config.hook.pytest_deselected(items=left)
        items[:] = [item for item in items if item not in set(left)]


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Seed what draws numbers by the test's name: a test that fails, fails again."""
    seed = zlib.crc32(item.nodeid.encode())
    torch.manual_seed(seed)
    random.seed(seed)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(seed)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Iterator[None]:
    """Skip an example that needs a plugin where that plugin is not installed: an example names a real optimizer."""
    try:
        return (yield)
    except doctest.UnexpectedException as failure:
        error = failure.exc_info[1]
        if isinstance(error, PluginNotInstalledError) and error.distribution not in _installed():
            pytest.skip(f"the example needs {error.distribution}")
        raise


def _installed() -> set[str]:
    return {distribution.name for distribution in distributions()}
