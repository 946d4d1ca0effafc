"""What a Muon refuses of a state that is loaded into it, before anything is taken."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from megaopt_core.errors import StateDictError
from megaopt_muon.arguments import validate_group

if TYPE_CHECKING:
    import torch

__all__ = ["require_shape", "validate_loaded"]


def validate_loaded(state: Mapping[str, Any]) -> None:
    """Raise unless groups and states can be those of a Muon.

    Args:
        state: `param_groups`, and `state` by parameter, as torch hands them to an optimizer that is loaded.

    Raises:
        ConfigurationError: a value of a group is out of its range.
        StateDictError: a group has no momentum, or a parameter's state has other tensors only.
    """
    groups: Sequence[Mapping[str, Any]] = state["param_groups"]
    for number, group in enumerate(groups):
        if "momentum" not in group:
            raise StateDictError(
                f"parameter group {number} has no 'momentum' but {_settings(group)}: it is not of a Muon",
                names=["momentum"],
            )
        validate_group(group)
    kept: Mapping[torch.Tensor, Mapping[str, Any]] = state["state"]
    for param, values in kept.items():
        if values and "momentum_buffer" not in values:
            raise StateDictError(
                f"{_described(param)} has no 'momentum_buffer' in its state but {list(values)}: it is not of a Muon",
                names=["momentum_buffer"],
            )


def require_shape(param: torch.Tensor, name: str, values: torch.Tensor, shape: tuple[int, ...]) -> None:
    """Raise unless a state has the shape that it has here.

    Args:
        param: whose state it is.
        name: of the state.
        values: what is loaded.
        shape: that it must have.

    Raises:
        StateDictError: it has another one.
    """
    if tuple(values.shape) != shape:
        raise StateDictError(
            f"{name!r} of {_described(param)} has shape {tuple(values.shape)}: must be {shape}, as its second moment "
            "here has one; the state is of another moment2_method, or of another shape",
            names=[name],
        )


def _settings(group: Mapping[str, Any]) -> list[str]:
    return sorted(key for key in group if key != "params")


def _described(param: torch.Tensor) -> str:
    info = getattr(param, "param_info", None)
    return f"parameter of shape {tuple(param.shape)}" if info is None else f"parameter {info.name!r}"
