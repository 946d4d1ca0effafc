"""Does what a checkpoint holds fit the values that are here: asked of all of it, before any of it is written."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from megaopt_core.errors import CheckpointError, CheckpointMismatchError, ConfigurationError
from megaopt_core.params._names import shown
from megaopt_core.state._restore.group_settings import GroupMerge
from megaopt_core.state._sources import MemorySource, Request, Source
from megaopt_core.state._values.encoding import decode, dtype_named

if TYPE_CHECKING:
    from megaopt_core.state._protocol import NamedState

__all__ = [
    "fits",
    "load_or_restore",
    "misfit",
    "mismatch",
    "named_errors",
    "require_same_shapes",
    "require_settings",
    "require_tensors",
]


_COUNT = "step"
"""The key under which torch's optimizers, and those that follow them, count the steps of a parameter."""

_UNCOUNTED = 2**63

_MAY_BE_NONE = ("max_lr", "min_lr", "start_wd", "end_wd")
"""Numbers of groups that None takes back: the scheduler's holds then."""


def mismatch(source: Source, what: str, names: Iterable[str] = ()) -> CheckpointMismatchError:
    """Return the error of a checkpoint that does not fit.

    Args:
        source: the checkpoint.
        what: what is wrong with it; its name is put before that.
        names: the parameters that do not fit.
    """
    return CheckpointMismatchError(f"{source.name} {what}", path=source.name, names=names)


@contextmanager
def named_errors(source: Source, what: str) -> Iterator[None]:
    """Let whatever cannot be done with a checkpoint's values be an error that names the checkpoint.

    Args:
        source: the checkpoint.
        what: what is done.
    """
    try:
        yield
    except (CheckpointError, ConfigurationError):
        raise
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise mismatch(source, f"does not fit: {what}: {type(error).__name__}: {error}") from error


def require_same_shapes(source: Source, wrong: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]]) -> None:
    """Raise where shapes are others in a checkpoint.

    Args:
        source: the checkpoint.
        wrong: name to its shape there and its shape here.

    Raises:
        CheckpointMismatchError: there is one.
    """
    if wrong:
        described = [
            f"{name} has shape {there} there and {here} here" for name, (there, here) in wrong.items()
        ]
        raise mismatch(source, f"does not fit: {shown(described)}", wrong)


def require_tensors(source: Source, requests: Iterable[Request]) -> None:
    """Require that stored tensors have the shape and the kind of elements of the places that they go to.

    Args:
        source: the checkpoint.
        requests: `(key, place)` pairs.

    Raises:
        CheckpointMismatchError: one has not.
        LookupError: tensors in memory are cut otherwise than their places.
    """
    requests = list(requests)
    for key, place in requests:
        stored = source.stored(key)
        there, here = _kind(dtype_named(stored.dtype)), _kind(place.dtype)
        if tuple(place.shape) != stored.shape:
            what = f"has shape {stored.shape} there and {tuple(place.shape)} here"
        elif there != here:
            what = f"holds {there} ({stored.dtype}) there and {here} ({place.dtype}) here"
        else:
            continue
        raise mismatch(source, f"does not fit: {key} {what}", [key])
    if isinstance(source, MemorySource):
        source.require_boxes(requests)


def _kind(dtype: torch.dtype) -> str:
    if dtype.is_floating_point:
        return "real numbers"
    return "complex numbers" if dtype.is_complex else "whole numbers"


def misfit(key: str, present: Any, encoded: Any) -> str | None:
    """Return why a value that is no tensor, such as a step count, cannot be what it should become; None: it can.

    Args:
        key: the state's key.
        present: what is here; None: nothing yet.
        encoded: what is in the checkpoint.
    """
    given = decode(encoded, _some_tensor)
    if not fits(present, given):
        return f"cannot become what it is here, {_shown(present)}"
    return "counts no steps" if key == _COUNT and not _is_count(given) else None


def _is_count(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.is_meta or value.numel() != 1 or _is_count(value.item())
    return value is not None and (not isinstance(value, (bool, int, float)) or 0 <= value < _UNCOUNTED)


def _some_tensor(key: str) -> torch.Tensor:
    return torch.empty(2, device="meta")


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


def require_settings(source: Source, optimizer: NamedState, merge: GroupMerge) -> None:
    """Require that settings of groups can be, and are of the kind that they are here.

    Args:
        source: the checkpoint.
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
