"""Which cases of a test plain `tox` runs, and which `tox run -e py312-long` alone."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest

__all__ = ["sometimes"]


def sometimes(cases: Iterable[Any], always: Collection[Any]) -> list[Any]:
    """Return cases as parameters of a test: some of them are run always, all in the long runs.

    Args:
        cases: values of the parameter, tuples where there are several.
        always: those that plain `tox` runs; at least one of each kind.
    """
    all_of_them = list(cases)
    unknown = [case for case in always if case not in all_of_them]
    if unknown:
        raise ValueError(f"there are no such cases: {unknown}")
    return [
        pytest.param(
            *(case if isinstance(case, tuple) else (case,)),
            marks=[] if case in always else [pytest.mark.long],
        )
        for case in all_of_them
    ]
