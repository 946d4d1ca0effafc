"""One pytest test for every optimizer and check."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from attrs import frozen

from megaopt_core.errors import ConformanceError
from megaopt_testing.check import BoundCheck, Check, Kind
from megaopt_testing.suite import bound_checks

if TYPE_CHECKING:
    import pytest

__all__ = ["parametrize_with_checks"]


def parametrize_with_checks(
    names: str | Iterable[str],
    *,
    checks: Iterable[Check] | None = None,
    xfail: Mapping[str, str] | None = None,
    at_least: int | None = None,
    kind: Kind | str = Kind.OPTIMIZER,
    **settings: Any,
) -> pytest.MarkDecorator:
    """Return a decorator that runs a test function for every optimizer and check.

    The function takes one argument, `check`, and calls it. A check that cannot be made is shown as skipped, one that
    fails as expected as xfailed. Needs pytest, which the core does not depend on.

    Args:
        names: registered name of an optimizer, or several; they are looked up when a test runs.
        checks: the checks; by default all of the kind.
        xfail: check id to the reason why it is known not to hold; one that holds all the same fails.
        at_least: how many checks can be made of each; fewer fail, so that none is lost unseen.
        kind: `"optimizer"`, `"strategy"`, `"schedule"`, `"roles"` or `"observers"`: what the names stand for.
        **settings: fields of the configuration, such as `lr` and the optimizer's own.

    Raises:
        UnknownNameError: `xfail` names no such check.

    Example:
        >>> @parametrize_with_checks("mine", lr=0.01)
        ... def test_conformance(check):
        ...     check()
    """
    import pytest

    listed = [names] if isinstance(names, str) else list(names)
    known = None if checks is None else list(checks)
    cases = []
    for name in listed:
        bound = bound_checks(name, settings, known, kind=Kind(kind), xfail=xfail)
        cases += [_case(check) for check in bound]
        if at_least is not None:
            cases.append(pytest.param(_Enough(name, tuple(bound), at_least), id=f"{name}-at_least"))
    return pytest.mark.parametrize("check", cases)


def _case(check: BoundCheck) -> Any:
    import pytest

    if check.xfail is None:
        return pytest.param(check, id=str(check))
    unmarked = BoundCheck(check.check, check.name, check.settings)
    return pytest.param(unmarked, id=str(check), marks=pytest.mark.xfail(reason=check.xfail, strict=True))


@frozen
class _Enough:
    """Holds when enough checks can be made.

    Args:
        name: of whom.
        checks: all that there are.
        at_least: how many have to be made.
    """

    name: str
    checks: tuple[BoundCheck, ...]
    at_least: int

    def __call__(self) -> None:
        """Count.

        Raises:
            ConformanceError: they are too few.
        """
        left_out = {
            check.check.id: reason for check in self.checks if (reason := check.why_not()) is not None
        }
        made = len(self.checks) - len(left_out)
        if made < self.at_least:
            told = "; ".join(f"{id_}: {reason}" for id_, reason in left_out.items())
            raise ConformanceError(
                f"{made} of {len(self.checks)} checks can be made, but at least {self.at_least} are declared ({told})",
                optimizer=self.name,
            )
