"""What an override may say about the parameters that its key matches, and how overrides combine."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any, TypedDict, cast

from megaopt_core.errors import OverrideConflictError, OverrideError, shown_value

__all__ = [
    "NO_OPTIMIZER",
    "OVERRIDE_FIELDS",
    "ParamGroupOverride",
    "combine_param_group_overrides",
    "param_group_override_to_tuple",
    "validate_override",
    "wrong_number",
]


class ParamGroupOverride(TypedDict, total=False):
    """Values of one parameter group that differ from the configuration's.

    The fields below are known to every optimizer. Further keys are allowed: `lr` (means `max_lr`), `optimizer`
    (sends the parameters to another registered optimizer), and any setting of the optimizer that steps them.

    Attributes:
        max_lr: the group's learning rate; with a scheduler, its maximum.
        min_lr: where the scheduler's decay ends.
        start_wd: weight decay at the scheduler's first step.
        end_wd: weight decay at the end of its increments.
        wd_mult: factor on the weight decay.
        lr_mult: kept with the group as part of its identity; the schedule does not read it.
        optimizer: name of the optimizer that steps these parameters; `"none"` leaves them to somebody else.
        clip_grad: False exempts the gradients from the clip factor; they count in the norm all the same.

    Example:
        >>> ParamGroupOverride(min_lr=1e-4, wd_mult=0.1)
        {'min_lr': 0.0001, 'wd_mult': 0.1}
    """

    max_lr: float
    min_lr: float
    start_wd: float
    end_wd: float
    wd_mult: float
    lr_mult: float
    optimizer: str
    clip_grad: bool


NO_OPTIMIZER = "none"
"""The `optimizer` of an override that excludes parameters: something else steps them."""

OVERRIDE_FIELDS = tuple(ParamGroupOverride.__annotations__)
_SCALARS = (str, bool, int, float, type(None))


def _wrong_value(key: str, value: Any) -> str | None:
    """Return what is wrong with a value of an override, None for one that it may have."""
    for entry in value if isinstance(value, tuple) else (value,):
        if not isinstance(entry, _SCALARS):
            return f"a value is a str, bool, int, float, None or a tuple of them, got {type(entry).__name__}"
    if key not in OVERRIDE_FIELDS:
        return None
    if key == "clip_grad":
        return None if isinstance(value, bool) else "must be True or False"
    if key == "optimizer":
        return None if isinstance(value, str) and value else "must be the name of an optimizer"
    return wrong_number(value)


def wrong_number(value: Any) -> str | None:
    """Return what is wrong with a learning rate, weight decay or factor; None for one that can be.

    Args:
        value: what was given.

    Example:
        >>> wrong_number(0.1), wrong_number(-1), wrong_number("much")
        (None, 'must be finite and not negative', 'must be a number')
    """
    if isinstance(value, bool) or not isinstance(value, Real):
        return "must be a number"
    number: Any = value
    return None if 0 <= number <= sys.float_info.max else "must be finite and not negative"


def validate_override(override: Mapping[str, Any]) -> ParamGroupOverride:
    """Return a checked copy of an override with `lr` written as `max_lr`.

    Args:
        override: the mapping that a user or a plugin gave; it is not changed.

    Raises:
        OverrideError: it is not a mapping, a key is not a str, `params` is among the keys, a value has a type that
            cannot be compared across ranks, or a number is negative or not finite.
        OverrideConflictError: `lr` and `max_lr` are both given and differ.
    """
    if not isinstance(override, Mapping):
        raise OverrideError(
            f"an override is a ParamGroupOverride (a dict), got {type(override).__name__}: {override!r}",
            value=override,
        )
    checked: dict[str, Any] = {}
    for given, raw in override.items():
        if not isinstance(given, str):
            raise OverrideError(f"an override's keys are strings, got {given!r}", value=given)
        if given == "params":
            raise OverrideError(
                f"an override cannot set 'params' (to {raw!r}): its key says which parameters it means",
                key="params",
                value=raw,
            )
        value = tuple(raw) if isinstance(raw, list) else raw
        key = "max_lr" if given == "lr" else given
        if key in checked and checked[key] != value:
            raise OverrideConflictError(
                f"the override sets 'lr' and 'max_lr', which mean the same, to {checked[key]!r} and {value!r}",
                key="max_lr",
                values=(checked[key], value),
            )
        wrong = _wrong_value(key, value)
        if wrong is not None:
            raise OverrideError(f"override {key}={shown_value(value)}: {wrong}", key=key, value=value)
        checked[key] = value
    return cast("ParamGroupOverride", checked)


def param_group_override_to_tuple(
    param_group_override: ParamGroupOverride | None,
) -> tuple[tuple[str, Any], ...] | None:
    """Return the override's items sorted by key, None for None: equal overrides give equal tuples.

    Args:
        param_group_override: the override, or None.

    Example:
        >>> param_group_override_to_tuple({"wd_mult": 0.0, "max_lr": 0.1})
        (('max_lr', 0.1), ('wd_mult', 0.0))
    """
    if param_group_override is None:
        return None
    return tuple(sorted(param_group_override.items()))


def combine_param_group_overrides(
    param_group_overrides: Sequence[ParamGroupOverride | None],
    *,
    sources: Sequence[str] = (),
    param_name: str | None = None,
) -> ParamGroupOverride:
    """Merge overrides into one; the order does not matter, and none of them is changed.

    Args:
        param_group_overrides: the overrides; None entries are skipped.
        sources: what each came from, for the error; as many as there are overrides, or none.
        param_name: the parameter that they all match, for the error.

    Returns:
        A new override with every key of every entry.

    Raises:
        OverrideConflictError: two entries give one key unequal values (a `ValueError`).

    Example:
        >>> combine_param_group_overrides([{"wd_mult": 0.0}, None, {"max_lr": 0.1}])
        {'wd_mult': 0.0, 'max_lr': 0.1}
    """
    combined: dict[str, Any] = {}
    origin: dict[str, str] = {}
    for index, override in enumerate(param_group_overrides):
        source = sources[index] if sources else f"override {index}"
        for key, value in (override or {}).items():
            if key in combined and combined[key] != value:
                who = f" for parameter {param_name!r}" if param_name else ""
                raise OverrideConflictError(
                    f"conflicting overrides{who}: {key!r} is {combined[key]!r} from {origin[key]} "
                    f"and {value!r} from {source}",
                    key=key,
                    values=(combined[key], value),
                    sources=(origin[key], source),
                )
            combined[key] = value
            origin.setdefault(key, source)
    return cast("ParamGroupOverride", combined)
