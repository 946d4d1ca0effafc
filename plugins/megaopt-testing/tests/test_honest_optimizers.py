"""The kit refuses no honest optimizer: published ones, written by their formulas, pass every check."""

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from megaopt_testing import run_checks, temporary_plugin

pytestmark = pytest.mark.any_python


def _honest_optimizers() -> ModuleType:
    path = Path(__file__).with_name("honest_optimizers.py")
    spec = importlib.util.spec_from_file_location("honest_optimizers", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


HONEST = _honest_optimizers()


@pytest.fixture(autouse=True, scope="module")
def _plugin() -> Iterator[None]:
    with temporary_plugin(HONEST.Plugin(), name="honest-optimizers"):
        yield


@pytest.mark.parametrize("name", HONEST.ENTRIES)
def test_an_honest_optimizer_passes(name: str) -> None:
    """Every check holds, or cannot be made: there are no settings, no split step, or no single elements."""
    results = run_checks(name)
    assert {result.id: result.message for result in results if not result.ok} == {}
    skipped = {result.id for result in results if result.status.value == "skipped"}
    assert skipped <= {"settings_documented", "settings_used", "granularity", "split_step"}
