"""How many features a projection takes and returns."""

from __future__ import annotations

from collections.abc import Collection

from torch import nn

from megaopt_core.routing import is_conv1d
from megaopt_roles.forward.uses import Use

__all__ = ["inputs_of", "outputs_of", "widths_made", "widths_taken"]


def outputs_of(module: nn.Module) -> int:
    """Return how many features a projection returns.

    Args:
        module: a projection.
    """
    return _features(module, "out_channels", "out_features", "nf", 0)


def inputs_of(module: nn.Module) -> int:
    """Return how many features a projection takes.

    Args:
        module: a projection.
    """
    return _features(module, "in_channels", "in_features", "nx", 1)


def widths_taken(param: nn.Parameter, uses: Collection[Use]) -> set[int]:
    """Return how many features products with a weight that is used by hand take.

    Args:
        param: the weight.
        uses: how it is used.
    """
    return {param.shape[use.inputs[0]] for use in uses if len(use.inputs) == 1}


def widths_made(param: nn.Parameter, uses: Collection[Use]) -> set[int]:
    """Return how many features products with a weight that is used by hand return.

    Args:
        param: the weight.
        uses: how it is used.
    """
    return {param.shape[use.outputs[0]] for use in uses if len(use.outputs) == 1}


def _features(module: nn.Module, channels: str, features: str, short: str, axis: int) -> int:
    for name in (channels, features, short):
        size = module.__dict__.get(name)
        if isinstance(size, int):
            return size
    weight = module._parameters.get("weight")
    return 0 if weight is None or weight.dim() < 2 else weight.shape[1 - axis if is_conv1d(module) else axis]
