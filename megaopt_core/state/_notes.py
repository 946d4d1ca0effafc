"""What steps note in groups of the parameters of a rank, and what joins the notes of several ranks into one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from megaopt_core.errors import MegaoptError, PluginError

if TYPE_CHECKING:
    import torch

    from megaopt_core.config._group_values import Check, GroupChecks

__all__ = ["joins_of", "note_checks"]


def joins_of(inner: torch.optim.Optimizer) -> Mapping[str, Callable[[Sequence[Any]], Any]]:
    """Return the keys of groups that an optimizer's steps write, each with what joins the notes of several ranks.

    Args:
        inner: an optimizer, whose class may say it in `noted_by_steps`.

    Raises:
        PluginError: the class says it in another way.
    """
    noted: Any = getattr(type(inner), "noted_by_steps", {})
    if isinstance(noted, Mapping) and all(map(callable, noted.values())):
        return noted
    raise PluginError(
        f"{type(inner).__name__}.noted_by_steps must map each key of a group to a function that joins a list of notes, "
        f"got {noted!r}"
    )


def note_checks(inner: torch.optim.Optimizer) -> GroupChecks:
    """Return the checks of the keys that steps write: what joins the notes of several ranks must be able to read one.

    Args:
        inner: an optimizer.

    Raises:
        PluginError: its class does not say right which keys it writes.
    """
    return {key: _reads(join) for key, join in joins_of(inner).items()}


def _reads(join: Callable[[Sequence[Any]], Any]) -> Check:
    def check(note: Any) -> str | None:
        try:
            join([note])
        except (MegaoptError, AttributeError, TypeError, ValueError) as error:
            return str(error).partition(": ")[2] or str(error)
        return None

    return check
