"""Phases of building that end alike on every rank."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from megaopt_core.errors import MegaoptError
from megaopt_core.parallel._agreement import Comparison, agree_over_ranks
from megaopt_core.parallel._groups import ProcessGroupCollection
from megaopt_core.routing._agreement import ADVICE

__all__ = ["raised_on_all"]


@contextmanager
def raised_on_all(pgs: ProcessGroupCollection, what: str) -> Iterator[list[Comparison]]:
    """Let what one rank raises inside the block be raised on all; it is given a list of what they must have alike.

    Args:
        pgs: the process groups.
        what: the phase, for errors.
    """
    alike: list[Comparison] = []
    error = None
    try:
        yield alike
    except MegaoptError as raised:
        error = raised
    agree_over_ranks(None, pgs, what, error=error, alike=alike, advice=ADVICE)
