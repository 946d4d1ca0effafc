"""Optimizers for these tests, brought by a plugin of their own, and models made from source text."""

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from megaopt_testing import temporary_plugin

from megaopt_core import OptimizerEntry, hookimpl


class StandIn:
    """Optimizers `plain` (element-wise) and `whole` (matrices, the rest to `plain`)."""

    megaopt_api = "1"

    @hookimpl
    def megaopt_optimizer_entries(self) -> dict[str, OptimizerEntry]:
        """Return both."""
        return {
            "plain": OptimizerEntry(torch.optim.SGD),
            "whole": OptimizerEntry(
                torch.optim.SGD,
                granularity="tensor",
                accepts=lambda spec, view: None if view is not None else "not a matrix",
                fallback="plain",
            ),
        }


@pytest.fixture
def stand_in() -> Iterator[None]:
    """Register the two."""
    with temporary_plugin(StandIn(), name="stand-in"):
        yield


@pytest.fixture(scope="session")
def generated_models() -> ModuleType:
    """Return the module that makes models from source text."""
    path = Path(__file__).with_name("generated_models.py")
    spec = importlib.util.spec_from_file_location("generated_models", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
