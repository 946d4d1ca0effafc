"""The parameters that hold the weight of a layer, or that it is made of."""

from __future__ import annotations

import torch

__all__ = ["made_of", "stored_weight"]


def made_of(module: torch.nn.Module, name: str) -> list[torch.nn.Parameter]:
    """Return the parameters that a parametrization, or a hook, makes a weight of, the largest first.

    Args:
        module: the layer.
        name: of the weight; nothing is returned where the layer holds it as it is.
    """
    parametrized = module._modules.get("parametrizations")
    if isinstance(parametrized, torch.nn.ModuleDict) and name in parametrized._modules:
        originals = [*parametrized[name]._parameters.values()]
    elif name in module._parameters or name not in module.__dict__:
        return []
    else:
        originals = [module._parameters.get(f"{name}_{suffix}") for suffix in ("v", "orig", "g")]
    found = (param for param in originals if param is not None and not torch.nn.parameter.is_lazy(param))
    return sorted(found, key=lambda param: -param.numel())


def stored_weight(module: torch.nn.Module) -> torch.nn.Parameter | None:
    """Return the parameter that holds the weight of a layer, or most of what it is made of.

    Args:
        module: the layer.
    """
    weight = module._parameters.get("weight")
    return next(iter(made_of(module, "weight")), None) if weight is None else weight
