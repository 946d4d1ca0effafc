"""What a class needs that no probe can find out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attrs import Factory, frozen

from megaopt_core.params import Granularity

__all__ = ["Recipe"]


@frozen
class Recipe:
    """What is to be known about one class beside its signature and what a probe of it shows.

    Args:
        refused: why megaopt cannot step it, in words; empty: it can.
        matrices_only: it is meant for matrices, whatever else its code takes; the rest goes to the fallback.
        fallback: the optimizer that steps what it does not take.
        granularity: it is at least as coarse as this, whatever the probe saw: state that only later steps touch.
        groups: what every group is given before the class sees it.
        always: constructor arguments that are always given; they are no settings.
        same_as: an optimizer whose first steps it shares for some tensors, which the trial does not see.
        hidden: constructor arguments that are no settings and keep their defaults.
        fails: check of the conformance kit to why the class does not hold it, in words.
    """

    refused: str = ""
    matrices_only: bool = False
    fallback: str = "adam"
    granularity: Granularity | None = None
    groups: Mapping[str, Any] = Factory(dict)
    always: Mapping[str, Any] = Factory(dict)
    same_as: str | None = None
    hidden: frozenset[str] = frozenset()
    fails: Mapping[str, str] = Factory(dict)
