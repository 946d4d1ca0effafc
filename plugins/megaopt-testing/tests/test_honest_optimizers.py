"""The kit refuses no honest optimizer: published ones, written by their formulas, pass every check."""

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from megaopt_testing import run_checks, temporary_plugin

from megaopt_core import OptimizerEntry, hookimpl

pytestmark = pytest.mark.any_python


def _module(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


HONEST = {
    name: make
    for file in ("honest_optimizers", "honest_variants", "honest_strangers")
    for name, make in _module(file).ENTRIES.items()
}
RANDOM = {"langevin"}
"""What a rank draws depends on what else it steps: values over ranks cannot be compared."""


class Plugin:
    """All of them."""

    megaopt_api = "1"

    @hookimpl
    def megaopt_optimizer_entries(self) -> dict[str, OptimizerEntry]:
        return {name: make() for name, make in HONEST.items()}


@pytest.fixture(autouse=True, scope="module")
def _plugin() -> Iterator[None]:
    with temporary_plugin(Plugin(), name="honest-optimizers"):
        yield


@pytest.mark.parametrize("name", HONEST)
def test_an_honest_optimizer_passes(name: str) -> None:
    """Every check holds, or cannot be made: there are no settings, no split step, or no single elements."""
    results = run_checks(name)
    assert {result.id: result.message for result in results if not result.ok} == {}
    skipped = {result.id for result in results if result.status.value == "skipped"}
    over_ranks = {"sharded", "resume_over_ranks"} if name in RANDOM else set()
    assert (
        skipped
        <= {"settings_documented", "settings_used", "settings_act", "granularity", "split_step"} | over_ranks
    )
