"""Only the core's own plugin: what else is installed must not change which styles are known."""

from collections.abc import Iterator

import pytest

from megaopt_core.registry import PluginRegistry, reset_registry


@pytest.fixture(autouse=True)
def _only_the_cores_plugin() -> Iterator[None]:
    reset_registry(PluginRegistry(entry_points=[], environ={}))
    yield
    reset_registry()
