"""Coefficients of the Newton-Schulz iteration, read from the installed emerging-optimizers."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from functools import cache
from numbers import Real
from typing import Any, Final, get_args

import torch

from megaopt_core.config import whole_number
from megaopt_core.errors import ConfigurationError, PluginError

__all__ = [
    "MOST_STEPS",
    "STEPS",
    "as_triples",
    "get_supported_coefficient_types",
    "resolve_coefficients",
    "validate_coefficient_type",
]

type Coefficients = tuple[tuple[float, float, float], ...]

MOST_STEPS = 100
"""Steps that are allowed; five to ten orthogonalize, and more than some dozens change nothing."""

STEPS: Final = whole_number(1, MOST_STEPS)
"""Which numbers of steps are allowed."""

_MOST: Final = 3.4028234663852886e38
"""The largest number of float32."""

# What to do when there are more steps than coefficients is not data that emerging-optimizers exports.
_REPEAT_LAST = frozenset({"polar_express", "cans", "deepseekv4"})


@cache
def get_supported_coefficient_types() -> tuple[str, ...]:
    """Return the coefficient types that the installed emerging-optimizers names.

    Returns:
        The members of its `NSCoeffT`, in its order; `"custom"` means coefficients that the user gives.

    Example:
        >>> "quintic" in get_supported_coefficient_types()
        True
    """
    from emerging_optimizers.orthogonalized_optimizers.muon_utils import NSCoeffT

    return tuple(get_args(NSCoeffT))


def validate_coefficient_type(coefficient_type: str) -> None:
    """Raise unless the installed emerging-optimizers names this coefficient type.

    Args:
        coefficient_type: the name.

    Raises:
        ConfigurationError: it does not (a `ValueError`).

    Example:
        >>> validate_coefficient_type("quintic")
    """
    supported = get_supported_coefficient_types()
    if coefficient_type not in supported:
        raise ConfigurationError.of(
            "coefficient_type", coefficient_type, f"the installed emerging-optimizers knows {list(supported)}"
        )


def resolve_coefficients(
    coefficient_type: str, steps: int, custom: Sequence[Sequence[float]] | None = None
) -> Coefficients:
    """Return one `(a, b, c)` for every step.

    With more steps than coefficients, `polar_express`, `cans` and `deepseekv4` repeat their last one, which converges;
    the others start over.

    Args:
        coefficient_type: one of :func:`get_supported_coefficient_types`.
        steps: number of Newton-Schulz steps, at most :data:`MOST_STEPS`.
        custom: the coefficients of type `"custom"`; they start over when there are more steps.

    Raises:
        ConfigurationError: the type is unknown, `steps` is out of range, or `custom` is missing, malformed or given for
            another type.

    Example:
        >>> resolve_coefficients("custom", 3, [(2.0, -1.5, 0.5), (1.5, -0.5, 0.0)])
        ((2.0, -1.5, 0.5), (1.5, -0.5, 0.0), (2.0, -1.5, 0.5))
    """
    validate_coefficient_type(coefficient_type)
    allowed = STEPS.refusal(steps)
    if allowed is not None:
        raise ConfigurationError(
            f"num_ns_steps={steps!r}: must be {allowed}", setting="muon_num_ns_steps", value=steps
        )
    sets = _checked(custom) if coefficient_type == "custom" else _installed(coefficient_type, custom)
    if coefficient_type in _REPEAT_LAST:
        return (*sets, *itertools.repeat(sets[-1], max(0, steps - len(sets))))[:steps]
    return tuple(itertools.islice(itertools.cycle(sets), steps))


def _installed(coefficient_type: str, custom: Sequence[Sequence[float]] | None) -> Coefficients:
    if custom is not None:
        raise ConfigurationError(
            f"coefficients={custom!r} are only read with coefficient_type='custom', which is {coefficient_type!r}",
            setting="muon_coefficients",
            value=custom,
        )
    from emerging_optimizers.orthogonalized_optimizers import muon_utils

    try:
        sets = muon_utils._COEFFICIENT_SETS[coefficient_type]
    except (AttributeError, KeyError) as error:
        raise PluginError(
            f"the installed emerging-optimizers names coefficient_type={coefficient_type!r} but brings no such set"
        ) from error
    return tuple((float(a), float(b), float(c)) for a, b, c in sets)


def as_triples(given: Any) -> Coefficients | None:
    """Return coefficients as triples of floats; None where they are no sequences of three numbers.

    Texts and switches are no numbers, though Python makes numbers of them, and mappings and sets have no order of
    their own.

    Args:
        given: what a user gave.

    Example:
        >>> as_triples([[2, -1.5, 0.5]]), as_triples(["123"]), as_triples([(True, 0, 0)])
        (((2.0, -1.5, 0.5),), None, None)
    """
    try:
        found = tuple(tuple(_elements(triple)) for triple in _elements(given))
        if not all(_is_number(number) for triple in found for number in triple):
            return None
        sets = tuple(tuple(float(number) for number in triple) for triple in found)
    except (TypeError, ValueError, OverflowError):
        return None
    return tuple((s[0], s[1], s[2]) for s in sets) if all(len(triple) == 3 for triple in sets) else None


def _elements(given: Any) -> Iterable[Any]:
    if isinstance(given, str | bytes | Mapping | AbstractSet):
        raise TypeError("no sequence")
    elements: Iterable[Any] = iter(given)
    return elements


def _is_number(value: Any) -> bool:
    number = value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value
    return isinstance(number, Real) and not isinstance(number, bool)


def _checked(custom: Any) -> Coefficients:
    sets = as_triples(custom) or ()
    if not sets or not all(_fits(number) for triple in sets for number in triple):
        raise ConfigurationError(
            f"coefficients={custom!r}: coefficient_type='custom' needs one or more (a, b, c) of finite numbers, as "
            "float32 holds them",
            setting="muon_coefficients",
            value=custom,
        )
    return sets


def _fits(number: float) -> bool:
    return abs(number) <= _MOST
