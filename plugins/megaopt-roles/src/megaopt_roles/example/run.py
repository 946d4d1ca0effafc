"""Runs a model once on the meta device, and notes which parameter meets what."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_iter, tree_map_only

from megaopt_roles.example.meetings import Meetings

__all__ = ["run_example"]


def run_example(model: nn.Module, example: Any) -> Meetings | None:
    """Run one forward on the meta device.

    Args:
        model: the model, unwrapped; its parameters and buffers are replaced by ones without values for the run.
        example: a batch: a tensor, a tuple of positional arguments, or a mapping of keyword arguments.

    Returns:
        What was seen; None, with a warning, where the model cannot be run without values.
    """
    held = dict(_held(model))
    made = {id(tensor): _on_meta(tensor) for tensor in held.values()}
    stand_ins = {name: made[id(tensor)] for name, tensor in held.items()}  # what is tied stays tied
    seen = Meetings()
    for param in model.parameters():
        seen.add_param(param, made[id(param)])
    args, kwargs = _arguments(tree_map_only(torch.Tensor, _on_meta, example))
    for tensor in _tensors((args, kwargs)):
        seen.add_input(tensor)
    try:
        with torch.no_grad(), torch.device("meta"), seen:
            # What is tied has one stand-in already; tied by torch, a module of two names would be filled twice.
            result = torch.func.functional_call(model, stand_ins, args, kwargs, tie_weights=False)
    except Exception as error:  # noqa: BLE001 - a model may do anything
        warnings.warn(
            f"the example could not be run on the meta device ({type(error).__name__}: {error}); roles are those that "
            "the source says",
            UserWarning,
            stacklevel=2,
        )
        return None
    seen.finish(_tensors(result))
    return seen


def _arguments(example: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(example, Mapping):
        return (), dict(example)
    return (tuple(example), {}) if isinstance(example, tuple | list) else ((example,), {})


def _held(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield parameters and buffers, each by the first name of the module that holds it.

    torch, which replaces them for a call, would not put back what it replaced by two names of one module.
    """
    for prefix, module in model.named_modules():
        for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
            if tensor is not None:
                yield f"{prefix}.{name}" if prefix else name, tensor


def _on_meta(tensor: torch.Tensor) -> torch.Tensor:
    if isinstance(tensor, nn.Parameter) and type(tensor.data) is torch.Tensor:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    return torch.empty(tuple(tensor.shape), dtype=tensor.dtype, device="meta")


def _tensors(value: Any, depth: int = 0) -> Iterator[torch.Tensor]:
    """Yield the tensors inside a result, through containers and objects that hold them as attributes."""
    for leaf in tree_iter(value):
        if isinstance(leaf, torch.Tensor):
            yield leaf
        elif isinstance(leaf, Mapping) and depth < 3:
            yield from _tensors(list(leaf.values()), depth + 1)
        elif depth < 3 and hasattr(leaf, "__dict__") and not isinstance(leaf, type | nn.Module):
            yield from _tensors(list(vars(leaf).values()), depth + 1)
