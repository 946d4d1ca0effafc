"""How many features a projection takes and returns."""

from __future__ import annotations

from collections.abc import Collection

from torch import nn

from megaopt_core.routing import is_conv1d
from megaopt_roles.forward.uses import Use

__all__ = ["inputs_of", "is_one_matrix", "outputs_of", "widths_made", "widths_taken"]


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
    return {param.shape[use.inputs[0]] for use in uses if len(use.inputs) == 1 or _is_kernel(param, use)}


def widths_made(param: nn.Parameter, uses: Collection[Use]) -> set[int]:
    """Return how many features products with a weight that is used by hand return.

    Args:
        param: the weight.
        uses: how it is used.
    """
    return {param.shape[use.outputs[0]] for use in uses if len(use.outputs) == 1}


def _is_kernel(param: nn.Parameter, use: Use) -> bool:
    """True for a product with `[out, in, *kernel]`."""
    return param.dim() > 3 and use.outputs == (0,) and use.inputs == tuple(range(1, param.dim()))


_OF_ONE = frozenset(["contracted", "rectified", "choosing", "paired", "gating", "measured", "penalized"])
"""Ways of use that leave a weight one matrix."""


def is_one_matrix(param: nn.Parameter, uses: Collection[Use]) -> bool:
    """True for a weight used by hand of which every product makes one matrix: of a kernel, or of a bilinear form.

    Args:
        param: the weight.
        uses: how it is used.
    """
    axes = set(range(param.dim()))
    products = [use for use in uses if use.kind == "contracted"]
    whole = all(use.outputs == (0,) and axes == {0, *use.inputs} for use in products)
    return bool(products) and whole and {use.kind for use in uses} <= _OF_ONE


def _features(module: nn.Module, channels: str, features: str, short: str, axis: int) -> int:
    for name in (channels, features, short):
        size = module.__dict__.get(name)
        if isinstance(size, int):
            return size
    weight = module._parameters.get("weight")
    return 0 if weight is None or weight.dim() < 2 else weight.shape[1 - axis if is_conv1d(module) else axis]
