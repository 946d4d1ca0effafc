"""How many features a projection takes and returns."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from torch import nn

from megaopt_core.routing import is_conv1d
from megaopt_roles.forward.uses import Use

__all__ = ["inputs_of", "made_by", "makes_alone", "outputs_of", "taken_by"]


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


def taken_by(layer: nn.Module | nn.Parameter, uses: Mapping[int, Collection[Use]]) -> set[int]:
    """Return how many features a layer takes, or products with a weight do; none where that is not known.

    Args:
        layer: a projection, or a weight that is used by hand.
        uses: how every parameter is used, by identity.
    """
    if not isinstance(layer, nn.Parameter):
        return {inputs_of(layer)}
    own = uses.get(id(layer), ())
    return {layer.shape[use.inputs[0]] for use in own if len(use.inputs) == 1 or _is_kernel(layer, use)}


def made_by(layer: nn.Module | nn.Parameter, uses: Mapping[int, Collection[Use]]) -> set[int]:
    """Return how many features a layer returns, or products with a weight do; none where that is not known.

    Args:
        layer: a projection, or a weight that is used by hand.
        uses: how every parameter is used, by identity.
    """
    if not isinstance(layer, nn.Parameter):
        return {outputs_of(layer)}
    own = uses.get(id(layer), ())
    return {layer.shape[use.outputs[-1]] for use in own if len(use.outputs) == 1 or _counts(layer, use)}


def _counts(param: nn.Parameter, use: Use) -> bool:
    """True for a product with a stack of three axes that keeps the one which counts: as many features are made each."""
    return param.dim() == 3 and len(use.outputs) == 2 and len(use.inputs) == 1


def _is_kernel(param: nn.Parameter, use: Use) -> bool:
    """True for a product with `[out, in, *kernel]`."""
    return param.dim() > 3 and use.outputs == (0,) and use.inputs == tuple(range(1, param.dim()))


def makes_alone(param: nn.Parameter, uses: Mapping[int, Collection[Use]]) -> bool:
    """True for a weight used by hand of which each product makes features of one size, and none adds matrices up.

    Args:
        param: the weight.
        uses: how every parameter is used, by identity.
    """
    several = (use for use in uses.get(id(param), ()) if len(use.inputs) > 1 and use.outputs != (0,))
    return len(made_by(param, uses)) == 1 and not any(several)


def _features(module: nn.Module, channels: str, features: str, short: str, axis: int) -> int:
    for name in (channels, features, short):
        size = module.__dict__.get(name)
        if isinstance(size, int):
            return size
    weight = module._parameters.get("weight")
    return 0 if weight is None or weight.dim() < 2 else weight.shape[1 - axis if is_conv1d(module) else axis]
