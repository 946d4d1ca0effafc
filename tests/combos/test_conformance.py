"""Every optimizer that is installed holds every check of the conformance kit."""

import os

import pytest
from megaopt_testing import BoundCheck, parametrize_with_checks

from megaopt_core import get_registry

pytestmark = pytest.mark.any_python


def _names() -> list[str]:
    """Return the optimizers to check: in the environment of one plugin its own, as others have theirs.

    What several plugins do together is checked where everything is installed, under each strategy.
    """
    registry = get_registry()
    _, _, plugin = os.environ.get("MEGAOPT_COMBO", "").partition("-")
    alone = any(info.name == plugin for info in registry.plugins())
    return [
        name
        for name in registry.optimizers()
        if not alone or registry.owner("optimizer", name).name == plugin
    ]


@parametrize_with_checks(_names())
def test_conformance(check: BoundCheck) -> None:
    """The check holds for the optimizer."""
    check()
