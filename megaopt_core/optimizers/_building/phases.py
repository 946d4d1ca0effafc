"""Phases of building that end alike on every rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from attrs import define

from megaopt_core.errors import MegaoptError
from megaopt_core.parallel._agreement import Comparison, agree_over_ranks
from megaopt_core.parallel._groups import ProcessGroupCollection
from megaopt_core.routing._agreement import ADVICE

__all__ = ["Phase", "raised_on_all"]


@define
class Phase:
    """A phase of building, of which ranks tell each other how it went.

    Args:
        alike: what ranks must have alike afterwards.
    """

    alike: Sequence[Comparison] = ()


@contextmanager
def raised_on_all(pgs: ProcessGroupCollection, what: str) -> Iterator[Phase]:
    """Let what one rank raises inside the block be raised on all.

    Args:
        pgs: the process groups.
        what: the phase, for errors.
    """
    phase, error = Phase(), None
    try:
        yield phase
    except MegaoptError as raised:
        error = raised
    agree_over_ranks(None, pgs, what, error=error, alike=phase.alike, advice=ADVICE)
