"""Models of transformers and timm describe themselves: their heads, their base model, and batches that they take."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import torch
from attrs import frozen
from torch import nn

from megaopt_roles.structure import Structure, is_a, is_layer

__all__ = ["Told", "own_batch", "told_by_libraries"]

_TRANSFORMERS, _TIMM = "transformers.", "timm."
_PRETRAINED = "transformers.modeling_utils.PreTrainedModel"
_LIGHTNING = (
    "lightning.pytorch.core.module.LightningModule",
    "pytorch_lightning.core.module.LightningModule",
)
_BASES = ("Model", "Encoder", "Decoder", "Stack", "Backbone")


@frozen
class Told:
    """The description of a model by the classes of libraries.

    Args:
        heads: the weights that a getter returns, by identity, with its name.
        has_heads: it is a model of transformers around its base model.
        getter_asked: the model is one of timm, and has said which of its layers is the classifier.
    """

    structure: Structure
    heads: dict[int, str]
    has_heads: bool
    getter_asked: bool

    def is_inside(self, name: str) -> bool | None:
        """Return whether a layer stands inside the base model of the nearest transformers model; None without one.

        Args:
            name: of the layer.
        """
        for above in (name, *self.structure.above(name)):
            model: Any = self.structure.modules[above]
            if not is_a(model, _PRETRAINED):
                continue
            base = model.base_model
            if base is model:
                if type(model).__name__.endswith(_BASES):
                    return True
                continue
            prefix = f"{above}.{model.base_model_prefix}" if above else model.base_model_prefix
            return name == prefix or name.startswith(f"{prefix}.")
        return None


def told_by_libraries(structure: Structure) -> Told:
    """Ask the getters of transformers and timm; those of a user's own classes are not asked.

    Args:
        structure: of the model.
    """
    heads: dict[int, str] = {}
    asked = False
    for module in structure.modules.values():
        for package, getter in ((_TRANSFORMERS, "get_output_embeddings"), (_TIMM, "get_classifier")):
            if not hasattr(module, getter) or not is_a(module, package):
                continue
            found: Any = None
            with suppress(Exception):  # a model without a head may raise anything
                found = getattr(module, getter)()
            asked |= getter == "get_classifier" and module is structure.model
            for head in found if isinstance(found, tuple | list) else [found]:
                if isinstance(head, nn.Module):
                    heads.update((id(weight), getter) for weight in _last_weights(head))
    model: Any = structure.model
    return Told(structure, heads, is_a(model, _PRETRAINED) and model.base_model is not model, asked)


def _last_weights(head: nn.Module) -> Iterator[nn.Parameter]:
    """Yield the weights of a head; of a small network the last one's."""
    head = head._modules.get("base_layer") or head  # factors of peft stand beside it
    layers = [
        part for part in head.modules() if is_layer(part) and part._parameters.get("weight") is not None
    ]
    if not isinstance(head, nn.ModuleList | nn.ModuleDict):
        layers = layers[-1:]
    for layer in layers:
        weight = layer._parameters["weight"]
        if weight is not None:
            yield weight


def own_batch(model: Any) -> Any:
    """Return a batch that a model of transformers, timm or Lightning names itself; None without one.

    Args:
        model: the model, unwrapped.
    """
    if is_a(model, _PRETRAINED):
        given: dict[str, Any] = {}
        with suppress(Exception):  # a property of the library may raise anything
            given = {key: one for key, one in model.dummy_inputs.items() if isinstance(one, torch.Tensor)}
        return given or None
    if is_a(model, *_LIGHTNING):
        return model.example_input_array
    told: Any = getattr(model, "pretrained_cfg", None) if is_a(model, _TIMM) else None
    size = told.get("input_size") if isinstance(told, dict) else None
    return torch.empty(2, *size, device="meta") if size else None
