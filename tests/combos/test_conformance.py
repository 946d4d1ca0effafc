"""Every optimizer that is installed holds every check of the conformance kit."""

from megaopt_core import get_registry
from megaopt_core.testing import BoundCheck, parametrize_with_checks


@parametrize_with_checks(get_registry().optimizers())
def test_conformance(check: BoundCheck) -> None:
    """The check holds for the optimizer."""
    check()
