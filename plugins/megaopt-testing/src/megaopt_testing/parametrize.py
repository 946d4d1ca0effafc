"""One pytest test for every optimizer and check."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from megaopt_testing.check import Check
from megaopt_testing.suite import CHECKS, bound_checks

if TYPE_CHECKING:
    import pytest

__all__ = ["parametrize_with_checks"]


def parametrize_with_checks(
    names: str | Iterable[str], *, checks: Iterable[Check] = CHECKS, **settings: Any
) -> pytest.MarkDecorator:
    """Return a decorator that runs a test function for every optimizer and check.

    The function takes one argument, `check`, and calls it. A check that cannot be made is shown as skipped. Needs
    pytest, which the core does not depend on.

    Args:
        names: registered name of an optimizer, or several; they are looked up when a test runs.
        checks: the checks; by default all.
        **settings: fields of the configuration, such as `lr` and the optimizer's own.

    Example:
        >>> @parametrize_with_checks("mine", lr=0.01)
        ... def test_conformance(check):
        ...     check()
    """
    import pytest

    listed = [names] if isinstance(names, str) else list(names)
    bound = [check for name in listed for check in bound_checks(name, settings, checks)]
    decorator: Callable[..., pytest.MarkDecorator] = pytest.mark.parametrize
    return decorator("check", [pytest.param(check, id=str(check)) for check in bound])
