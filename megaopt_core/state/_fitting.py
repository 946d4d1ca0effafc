"""Can a value take the place of another: asked of all that a load brings, before any of it is written."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from megaopt_core.errors import CheckpointError, CheckpointMismatchError, ConfigurationError
from megaopt_core.params._names import shown

if TYPE_CHECKING:
    from megaopt_core.state._group_settings import GroupMerge
    from megaopt_core.state._protocol import StatefulOptimizer

__all__ = [
    "fits",
    "load_or_restore",
    "misfit",
    "mismatch",
    "named_errors",
    "number_kind",
    "require_names",
    "require_same_shapes",
    "require_settings",
]

_COUNT = "step"
"""The key under which torch's optimizers, and those that follow them, count the steps of a parameter."""

_UNCOUNTED = 2**63

_MAY_BE_NONE = ("max_lr", "min_lr", "start_wd", "end_wd")
"""Numbers of groups that None takes back: the scheduler's holds then."""


def mismatch(source: str, what: str, names: Iterable[str] = ()) -> CheckpointMismatchError:
    """Return the error of something saved that does not fit.

    Args:
        source: what errors call that which is loaded.
        what: what is wrong with it; its name is put before that.
        names: the parameters that do not fit.
    """
    return CheckpointMismatchError(f"{source} {what}", path=source, names=names)


@contextmanager
def named_errors(source: str, what: str) -> Iterator[None]:
    """Let whatever cannot be done with saved values be an error that names their source.

    Args:
        source: what errors call that which is loaded.
        what: what is done.
    """
    try:
        yield
    except (CheckpointError, ConfigurationError):
        raise
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise mismatch(source, f"does not fit: {what}: {type(error).__name__}: {error}") from error


def require_same_shapes(source: str, wrong: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]]) -> None:
    """Raise where shapes are others than those that were saved.

    Args:
        source: what errors call that which is loaded.
        wrong: name to its shape there and its shape here.

    Raises:
        CheckpointMismatchError: there is one.
    """
    if wrong:
        described = [
            f"{name} has shape {there} there and {here} here" for name, (there, here) in wrong.items()
        ]
        raise mismatch(source, f"does not fit: {shown(described)}", wrong)


def require_names(
    source: str,
    missing: tuple[str, ...] | list[str],
    unexpected: tuple[str, ...] | list[str],
    frozen: list[str],
) -> None:
    """Raise unless names are the same on both sides.

    Args:
        source: what errors call that which is loaded.
        missing: what is here, and was not saved; states end in `" (state)"`.
        unexpected: what was saved, and is not here.
        frozen: those of it that are frozen here, and have no place.

    Raises:
        CheckpointMismatchError: they are not.
    """
    parts = []
    if missing:
        parts.append(f"it lacks {shown(missing)}")
    if unexpected:
        parts.append(f"it has {shown(unexpected)}, which is not here")
    if frozen:
        parts.append(
            f"{shown(frozen)} is frozen here, where this sharding gives state no place: build the optimizer with the "
            "parameter trainable and its learning rate 0"
        )
    if parts:
        raise mismatch(
            source,
            f"does not fit: {'; '.join(parts)}. strict=False loads the parts that fit, and rename= of "
            "load_checkpoint maps old names to new ones",
            [name.removesuffix(" (state)") for name in (*missing, *unexpected)],
        )


def number_kind(dtype: torch.dtype) -> str:
    """Return what a dtype holds, in words.

    Args:
        dtype: of a tensor.
    """
    if dtype.is_floating_point:
        return "real numbers"
    return "complex numbers" if dtype.is_complex else "whole numbers"


def misfit(key: str, present: Any, given: Any) -> str | None:
    """Return why a value that is no tensor, such as a step count, cannot be what it should become; None: it can.

    Args:
        key: the state's key.
        present: what is here; None: nothing yet.
        given: what is in the checkpoint.
    """
    if not fits(present, given):
        return f"cannot become what it is here, {_shown(present)}"
    return "counts no steps" if key == _COUNT and not _is_count(given) else None


def _is_count(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.is_meta or value.numel() != 1 or _is_count(value.item())
    return value is not None and (not isinstance(value, (bool, int, float)) or 0 <= value < _UNCOUNTED)


def _shown(value: Any) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)


def fits(present: Any, value: Any) -> bool:
    """Return whether a value can take the place of another one, by what kind of value they are.

    Args:
        present: what is here; None: anything can take its place.
        value: what would come.

    Example:
        >>> fits(torch.zeros(()), 3), fits(0.9, "0.9"), fits((0.9, 0.99), [0.9, 0.95])
        (True, False, True)
    """
    if present is None or value is None:
        return True
    if isinstance(present, torch.Tensor):
        if isinstance(value, torch.Tensor):
            return (present.numel() == 1) == (value.numel() == 1) and not value.is_complex()
        return present.numel() == 1 and isinstance(value, (bool, int, float))
    if isinstance(present, (bool, int, float)):
        number = isinstance(value, torch.Tensor) and value.numel() == 1 and not value.is_complex()
        return number or isinstance(value, (bool, int, float))
    for kind in ((str,), (bytes,), (list, tuple), (Mapping,), (set, frozenset)):
        if isinstance(present, kind):
            return isinstance(value, kind)
    return True


def _fits_each(present: Any, value: Any) -> bool:
    if isinstance(present, (list, tuple)) and isinstance(value, (list, tuple)):
        return len(present) == len(value) and all(map(fits, present, value))
    return fits(present, value)


def require_settings(source: str, optimizer: StatefulOptimizer, merge: GroupMerge) -> None:
    """Require that settings of groups can be, and are of the kind that they are here.

    Args:
        source: what errors call that which is loaded.
        optimizer: whose groups.
        merge: what a load will write.

    Raises:
        CheckpointMismatchError: one is not.
    """
    groups = zip(optimizer.param_groups, optimizer.group_checks, merge.changes, strict=True)
    for index, (group, checks, changes) in enumerate(groups):
        for key, value in changes.items():
            present, wrong = group.get(key), checks[key](value) if key in checks else None
            if wrong is not None:
                what, why = "cannot be", f": {wrong}"
            elif key == "params" or not _fits_each(present, value) or _is_no_number(key, present, value):
                what, why = "does not fit", f" and {_shown(present)} here"
            else:
                continue
            raise mismatch(source, f"{what}: the setting {key!r} of group {index} is {value!r} there{why}")


def _is_no_number(key: str, present: Any, value: Any) -> bool:
    """Return whether a finite number would become None, infinite or NaN, which the next step could not compute with."""
    if isinstance(present, torch.Tensor) or value is None:
        is_number = isinstance(present, (int, float, torch.Tensor))
        return value is None and is_number and key not in _MAY_BE_NONE
    both = isinstance(present, (int, float)) and isinstance(value, float)
    return both and math.isfinite(present) and not math.isfinite(value)


def load_or_restore(load: Callable[[Any], Any], state: Any, before: Any) -> Callable[[], None]:
    """Give a state to something that takes one, and return what takes it back.

    Args:
        load: takes a state.
        state: what it is given.
        before: what it had; it is given that back at once if it refuses.
    """
    try:
        load(state)
    except BaseException:
        load(before)
        raise
    return lambda: load(before)
