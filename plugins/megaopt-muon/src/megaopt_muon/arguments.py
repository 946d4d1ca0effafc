"""What the constructors of Muon refuse, and groups that are added later."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Real
from types import MappingProxyType
from typing import Any, Final

import torch

from megaopt_core.config import between, not_negative, positive, whole_number
from megaopt_core.errors import ConfigurationError, ViewError
from megaopt_core.params import is_dtensor
from megaopt_core.plugin_api import require_argument
from megaopt_muon.choice.plan_text import parsed_plan
from megaopt_muon.scale import validate_scale_mode
from megaopt_muon.settings import MATMUL_PRECISIONS, NS_METHODS, SPLITS, TP_MODES

__all__ = [
    "held_number",
    "hold_group",
    "require_plain",
    "validate_arguments",
    "validate_group",
    "validate_numbers",
]

_NUMBERS: Final = MappingProxyType(
    {
        "lr": not_negative(),
        "weight_decay": not_negative(),
        "momentum": between(0.0, 1.0),
        "beta2": between(0.0, 1.0),
        "norm_eps": positive(),
        "eps": positive(),
        "extra_scale_factor": positive(),
    }
)
_CHOICES: Final = MappingProxyType(
    {
        "fp32_matmul_prec": MATMUL_PRECISIONS,
        "split": SPLITS,
        "tp_mode": TP_MODES,
        "ns_method": NS_METHODS,
    }
)
_MAY_BE_TENSORS: Final = ("lr", "weight_decay")
_OF_ALL_GROUPS: Final = frozenset(
    {
        *_CHOICES,
        "coefficient_type",
        "coefficients",
        "extra_scale_factor",
        "is_qkv_fn",
        "moment2_method",
        "nesterov",
        "norm_eps",
        "num_ns_steps",
        "pg_collection",
        "qkv_split_shapes",
        "scale_mode",
        "split_qkv",
        "use_decoupled_weight_decay",
    }
)
_ROWS: Final = whole_number(1)


def validate_arguments(
    numbers: Mapping[str, Any],
    switches: Mapping[str, Any],
    choices: Mapping[str, Any],
    *,
    scale_mode: Any,
    is_qkv_fn: Any,
    qkv_split_shapes: Any,
) -> None:
    """Raise unless every argument is in its range.

    Args:
        numbers: arguments that are numbers, by name; one may be a tensor of one element.
        switches: those that are True or False.
        choices: those that are one of some words.
        scale_mode: how the update grows with its matrix.
        is_qkv_fn: says which parameters are fused.
        qkv_split_shapes: their rows of query, key and value in one query group.

    Raises:
        ConfigurationError: one is not (a `ValueError`).
    """
    validate_numbers(numbers)
    for name, value in switches.items():
        require_argument(isinstance(value, bool), name, value, "True or False")
    for name, value in choices.items():
        allowed = _CHOICES[name]
        require_argument(isinstance(value, str) and value in allowed, name, value, f"one of {allowed}")
    require_argument(is_qkv_fn is None or callable(is_qkv_fn), "is_qkv_fn", is_qkv_fn, "a function, or None")
    require_argument(
        qkv_split_shapes is None or _are_rows(qkv_split_shapes),
        "qkv_split_shapes",
        qkv_split_shapes,
        "the rows of query, key and value, each a whole number above 0, or None",
    )
    validate_scale_mode(scale_mode)


def hold_group(group: dict[str, Any]) -> None:
    """Check what a group says for itself, and hold its numbers as those of constructors are held.

    Args:
        group: a parameter group; what it does not say is the optimizer's default.

    Raises:
        ConfigurationError: a value is out of its range, or a setting is not of a group (a `ValueError`).
    """
    misplaced = [name for name in group if name in _OF_ALL_GROUPS]
    if misplaced:
        name = misplaced[0]
        raise ConfigurationError(
            f"{name}={group[name]!r} in a parameter group: one optimizer has one {name} for all its groups; give it "
            "to the constructor, and parameters of another one to another optimizer",
            setting=name,
            value=group[name],
        )
    validate_group(group)
    group.update({name: held_number(name, group[name]) for name in _NUMBERS if name in group})


def validate_group(group: Mapping[str, Any]) -> None:
    """Raise unless what a group says for itself is in its range.

    Args:
        group: a parameter group; what it does not say is the optimizer's default.

    Raises:
        ConfigurationError: a value is not (a `ValueError`).
    """
    validate_numbers({name: group[name] for name in _NUMBERS if name in group})
    cautious = group.get("cautious_weight_decay", False)
    require_argument(isinstance(cautious, bool), "cautious_weight_decay", cautious, "True or False")
    parsed_plan(group.get("ns_plan", ""))


def require_plain(param: torch.Tensor) -> None:
    """Raise for a DTensor, whose part on this rank is no matrix.

    Args:
        param: a parameter that the class is given, without the rest of megaopt.

    Raises:
        ViewError: it is one.
    """
    if is_dtensor(param):
        raise ViewError(
            f"parameter of shape {tuple(param.shape)} is a DTensor ({param.placements}), which this class does not "  # type: ignore[attr-defined] # of DTensors
            "step by itself; build_optimizer(model, ...) does, with sharding='fsdp' where fully_shard cut it"
        )


def validate_numbers(numbers: Mapping[str, Any]) -> None:
    """Raise unless every number is in its range.

    Args:
        numbers: arguments by name; one may be a tensor of one element.

    Raises:
        ConfigurationError: one is not (a `ValueError`).
    """
    for name, value in numbers.items():
        allowed = _NUMBERS[name].refusal(_plain(value))
        require_argument(allowed is None, name, value, str(allowed))


def held_number(name: str, value: Any) -> Any:
    """Return a number as a group holds it: a float, whose size torch takes.

    A learning rate or a weight decay that is a tensor stays one, which schedulers and graphs write into.

    Args:
        name: of the setting.
        value: a number that has been validated.
    """
    if isinstance(value, torch.Tensor) and name in _MAY_BE_TENSORS:
        return value
    return float(_plain(value))


def _plain(value: Any) -> Any:
    """Return a tensor of one element, or a number of another package, as a number of Python."""
    if isinstance(value, torch.Tensor):
        return value.item() if value.numel() == 1 and not value.is_meta else value
    is_foreign = isinstance(value, Real) and not isinstance(value, int | float)
    return float(value) if is_foreign else value


def _are_rows(shapes: Any) -> bool:
    """Return whether something is three whole numbers above 0."""
    is_triple = isinstance(shapes, Sequence) and len(shapes) == 3
    return is_triple and all(_ROWS.refusal(rows) is None for rows in shapes)
