"""Every optimizer that is installed holds every check of the conformance kit."""

from megaopt_testing import BoundCheck, parametrize_with_checks

from megaopt_core import get_registry


@parametrize_with_checks(get_registry().optimizers())
def test_conformance(check: BoundCheck) -> None:
    """The check holds for the optimizer."""
    check()
