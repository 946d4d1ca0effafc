"""Learning rates that decay from layer to layer, in the groups of timm."""

from __future__ import annotations

from collections.abc import Collection

import torch

from megaopt_core import OptimizerConfig, ParamGroupOverride, ParamKey, get_standard_config_overrides
from megaopt_core.errors import ConfigurationError

__all__ = ["layer_decay_overrides"]


def layer_decay_overrides(
    model: torch.nn.Module, *, lr: float, layer_decay: float
) -> dict[ParamKey, ParamGroupOverride]:
    r"""Return the standard overrides with the learning rates of `timm.optim.param_groups_layer_decay`.

    The layers of the model are those of timm; one of depth :math:`i` of :math:`n` has the learning rate
    :math:`\text{lr} \cdot \text{layer_decay}^{n - i}`. Parameters that the model lists in `no_weight_decay()` do not
    decay. timm's and torch's schedulers multiply what each group began with.

    Args:
        model: a model of timm.
        lr: the learning rate of the last layer; give `build_optimizer` the same.
        layer_decay: factor from a layer to the one before, in (0, 1].

    Returns:
        Overrides for `build_optimizer(overrides=...)`.

    Raises:
        ConfigurationError: `layer_decay` is not in (0, 1].

    Example:
        `build_optimizer(model, "muon", lr=1e-3, overrides=layer_decay_overrides(model, lr=1e-3, layer_decay=0.75))`
    """
    if not (isinstance(layer_decay, int | float) and 0 < layer_decay <= 1):
        raise ConfigurationError(f"layer_decay_overrides(layer_decay={layer_decay!r}): a factor in (0, 1]")
    # A trainer's own package, where it is used.
    from timm.optim import param_groups_layer_decay  # type: ignore[attr-defined,unused-ignore]

    name_of = {param: name for name, param in model.named_parameters()}
    overrides = get_standard_config_overrides(OptimizerConfig())
    for group in param_groups_layer_decay(model, layer_decay=layer_decay):
        names = tuple(name_of[param] for param in group["params"])
        if group["lr_scale"] != 1:
            overrides[ParamKey(name=names)] = ParamGroupOverride(max_lr=lr * group["lr_scale"])
    listed: Collection[str] = getattr(model, "no_weight_decay", set)()
    without = tuple(
        name for name, param in model.named_parameters() if name in listed and param.requires_grad
    )
    if without:
        overrides[ParamKey(name=without)] = ParamGroupOverride(wd_mult=0.0)
    return overrides
