"""The kit refuses no honest optimizer: published ones, written by their formulas, pass every check."""

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from megaopt_testing import CHECKS, run_checks, temporary_plugin

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

OVER_RANKS = {"sharded", "resume_over_ranks", "world_sizes"}
"""Checks that start ranks, and take most of the kit's time."""

KINDS = {"ademamix", "blocks", "langevin", "nesterov_sgd", "schedule_free_sgd", "shampoo_like"}
"""One of each kind of state and step: these are tried in every run of the tests, all others in the long one."""


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


SKIPPED = {"settings_documented", "settings_used", "settings_act", "granularity", "split_step"}
"""What may not be made of them: there are no settings, no split step, or no single elements."""


EACH_KIND = [name if name in KINDS else pytest.param(name, marks=pytest.mark.long) for name in HONEST]


@pytest.mark.parametrize("name", EACH_KIND)
def test_an_honest_optimizer_passes(name: str) -> None:
    """Every check of one process holds, or cannot be made."""
    alone = [check for check in CHECKS if check.id not in OVER_RANKS]
    results = run_checks(name, checks=alone)
    assert {result.id: result.message for result in results if not result.ok} == {}
    assert {result.id for result in results if result.status.value == "skipped"} <= SKIPPED


@pytest.mark.parametrize("name", EACH_KIND)
def test_an_honest_optimizer_passes_over_ranks(name: str) -> None:
    """Every check that starts ranks holds, or cannot be made."""
    results = run_checks(name, checks=[check for check in CHECKS if check.id in OVER_RANKS])
    assert {result.id: result.message for result in results if not result.ok} == {}
    skipped = {result.id for result in results if result.status.value == "skipped"}
    assert skipped == ({"sharded", "resume_over_ranks"} if name in RANDOM else set())


def test_kinds_are_honest_optimizers() -> None:
    """None of them has been renamed."""
    assert set(HONEST) >= KINDS
