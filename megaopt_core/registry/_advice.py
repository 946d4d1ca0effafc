"""The end of the error about a name that there is not: what plugins advise, else a name that is close."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from megaopt_core.registry._missing import did_you_mean
from megaopt_core.registry._registry import get_registry

__all__ = ["advice_on"]


def advice_on(
    name: str,
    known: Iterable[str],
    optimizer: str | None = None,
    *,
    kind: Literal["setting", "override", "argument"] = "setting",
) -> str:
    """Return what to write in place of a name that there is not, as the end of a sentence; empty without a guess.

    Args:
        name: what was given.
        known: the names that there are.
        optimizer: the optimizer that it was meant for, where it is known.
        kind: what the name was given as.

    Example:
        >>> advice_on("weigth_decay", ["lr", "weight_decay"])
        "; did you mean 'weight_decay'?"
    """
    known = list(known)
    asked = get_registry().call_each(
        "megaopt_advice", failed=[], name=name, known=known, optimizer=optimizer, kind=kind
    )
    return next((advice for _, advice in asked if isinstance(advice, str)), did_you_mean(name, known))
