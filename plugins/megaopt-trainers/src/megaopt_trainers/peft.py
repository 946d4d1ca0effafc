"""Learning rates of low-rank adapters: PEFT's modules are known by their names, PEFT itself is not imported."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megaopt_core import OptimizerConfig, ParamGroupOverride, ParamKey, get_standard_config_overrides
from megaopt_core.errors import ConfigurationError

__all__ = ["lora_overrides"]

_FACTORS_B = ("lora_B",)
_OF_EMBEDDINGS = ("lora_embedding_A", "lora_embedding_B")


def lora_overrides(
    model: torch.nn.Module, *, lr: float, ratio: float = 1.0, embedding_lr: float | None = None
) -> dict[ParamKey, ParamGroupOverride]:
    r"""Return the standard overrides with learning rates of their own for LoRA's factors B and for adapted embeddings.

    An adapter adds :math:`B A` to a weight, with A of shape (rank, in) and B of shape (out, rank). B begins at zero and
    wants a larger learning rate: :math:`\eta_B = \text{ratio} \cdot \eta_A`.

    Args:
        model: the model with its adapters, as `peft.get_peft_model` returns it.
        lr: the learning rate of the factors A and of everything else that trains; give `build_optimizer` the same.
        ratio: of the learning rate of B to that of A. For adam, LoRA+ uses 16. For muon with
            `muon_scale_mode="shape_scaling"`, 1: its scale is :math:`\sqrt{\text{out}/\text{rank}}` for B and 1 for A.
        embedding_lr: of adapters of embeddings, both factors; None: `lr`.

    Returns:
        Overrides for `build_optimizer(overrides=...)`.

    Raises:
        ConfigurationError: a number is not positive and finite, no factor B trains in the model, or `embedding_lr` is
            given and no embedding has an adapter.

    References:
        Hayou, Ghosh, Yu, "LoRA+: Efficient Low Rank Adaptation of Large Models", 2024.

    Example:
        >>> import torch
        >>> from megaopt_core import build_optimizer
        >>> from megaopt_trainers.peft import lora_overrides
        >>> class Adapted(torch.nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.base_layer = torch.nn.Linear(8, 8).requires_grad_(False)
        ...         self.lora_A = torch.nn.ModuleDict({"default": torch.nn.Linear(8, 2, bias=False)})
        ...         self.lora_B = torch.nn.ModuleDict({"default": torch.nn.Linear(2, 8, bias=False)})
        >>> model = torch.nn.Sequential(Adapted())
        >>> optimizer = build_optimizer(model, "adam", lr=0.25, overrides=lora_overrides(model, lr=0.25, ratio=16))
        >>> sorted(group["lr"] for group in optimizer.param_groups)
        [0.25, 4.0]
    """
    for name, value in (("lr", lr), ("ratio", ratio), ("embedding_lr", embedding_lr)):
        if value is not None and not (isinstance(value, int | float) and 0 < value < float("inf")):
            raise ConfigurationError(f"lora_overrides({name}={value!r}): a positive, finite number")
    factors, of_embeddings = _names(model, _FACTORS_B), _names(model, _OF_EMBEDDINGS)
    if not factors and not of_embeddings:
        raise ConfigurationError(
            "lora_overrides(): no parameter of the model that trains is a factor of a low-rank adapter (lora_B, "
            "lora_embedding_B): give the model that peft.get_peft_model() returns"
        )
    if embedding_lr is not None and not of_embeddings:
        raise ConfigurationError(
            f"lora_overrides(embedding_lr={embedding_lr!r}): no embedding of the model has an adapter that trains"
        )
    overrides = get_standard_config_overrides(OptimizerConfig())
    if factors and ratio != 1:
        overrides[ParamKey(name=tuple(factors))] = ParamGroupOverride(max_lr=lr * ratio)
    if embedding_lr is not None:
        overrides[ParamKey(name=tuple(of_embeddings))] = ParamGroupOverride(max_lr=embedding_lr)
    return overrides


def _names(model: torch.nn.Module, parts: Sequence[str]) -> list[str]:
    """Return the trainable parameters below a module or dictionary of one of these names."""
    return [
        name
        for name, param in model.named_parameters()
        if param.requires_grad and not set(parts).isdisjoint(name.split("."))
    ]
