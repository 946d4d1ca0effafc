"""Runs a model once, on the meta device where that is possible, and notes which parameter meets what."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any, Final

import torch
from torch import nn
from torch.distributions import Distribution
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_iter, tree_map_only

from megaopt_roles.example.meetings import Meetings
from megaopt_roles.forward.operations.arguments import argument

__all__ = ["run_example"]

_LARGEST: Final = 1 << 26
"""Elements up to which a model's values are copied to run it, where it cannot be run without them."""


def run_example(model: nn.Module, example: Any) -> Meetings | None:
    """Run one forward: on the meta device, or of a small model with copies of its values, where it needs these.

    Args:
        model: the model, unwrapped; its parameters and buffers are replaced by others for the run.
        example: a batch: a tensor, a tuple of positional arguments, or a mapping of keyword arguments.

    Returns:
        What was seen; None, with a warning, where neither way runs.
    """
    held = dict(_held(model))
    try:
        return _seen(model, held, tree_map_only(torch.Tensor, _on_meta, example), _on_meta)
    except Exception as error:  # noqa: BLE001 - a model may do anything
        why = _told(error)
    size = sum(tensor.numel() for tensor in {id(tensor): tensor for tensor in held.values()}.values())
    if any(tensor.is_meta for tensor in held.values()):
        more = "and the model has no values"
    elif size > _LARGEST:
        more = f"and its {size} elements are more than the {_LARGEST} that are copied to run it with values"
    else:
        devices = {tensor.device for tensor in held.values() if tensor.device.type == "cuda"}
        try:
            with torch.random.fork_rng([*devices]):
                return _seen(model, held, tree_map_only(torch.Tensor, _copied, example), _copied)
        except Exception as error:  # noqa: BLE001 - the same
            more = f"nor with a copy of its values ({_told(error)})"
    warnings.warn(
        f"the example could not be run on the meta device ({why}), {more}; roles are those that the source says",
        UserWarning,
        stacklevel=2,
    )
    return None


def _seen(
    model: nn.Module,
    held: Mapping[str, torch.Tensor],
    example: Any,
    stand_in: Callable[[torch.Tensor], torch.Tensor],
) -> Meetings:
    """Run a model on an example with something in the place of all that it holds, and return what was seen."""
    made = {id(tensor): stand_in(tensor) for tensor in held.values()}
    stand_ins = {name: made[id(tensor)] for name, tensor in held.items()}  # what is tied stays tied
    seen = Meetings()
    for param in model.parameters():
        seen.add_param(param, made[id(param)])
    args, kwargs = _arguments(example)
    for tensor in _tensors((args, kwargs)):
        seen.add_input(tensor)
    place = torch.device("meta") if stand_in is _on_meta else nullcontext()
    with torch.no_grad(), _in_single_operators(), place, _Derivatives(seen), seen:
        # What is tied has one stand-in already; tied by torch, a module of two names would be filled twice.
        result = torch.func.functional_call(model, stand_ins, args, kwargs, tie_weights=False)
    seen.finish(_tensors(result))
    return seen


class _Derivatives(TorchFunctionMode):
    """Lets a model differentiate what it made: gradients are zeros here, which come from what is differentiated."""

    def __init__(self, seen: Meetings) -> None:
        super().__init__()
        self.seen = seen

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one function of torch."""
        if func is not torch.autograd.grad:
            return func(*args, **(kwargs or {}))
        outputs, inputs = (
            _tensors(argument(at, name, args, kwargs or {})) for at, name in enumerate(("outputs", "inputs"))
        )
        gradients = tuple(torch.zeros_like(tensor) for tensor in inputs)
        self.seen.derive(outputs, gradients)
        return gradients


@contextmanager
def _in_single_operators() -> Iterator[None]:
    """Run recurrent layers operator by operator, and keep distributions from looking at their parameters' values."""
    checks = Distribution._validate_args
    fused: list[Any] = [torch.backends.mkldnn, torch.backends.cudnn]
    enabled = [library.enabled for library in fused]
    try:
        Distribution.set_default_validate_args(False)
        for library in fused:
            library.enabled = False
        yield
    finally:
        Distribution.set_default_validate_args(checks)
        for library, was in zip(fused, enabled, strict=True):
            library.enabled = was


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


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


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone()


def _tensors(value: Any, depth: int = 0) -> Iterator[torch.Tensor]:
    """Yield the tensors inside a result, through containers and objects that hold them as attributes."""
    for leaf in tree_iter(value):
        if isinstance(leaf, torch.Tensor):
            yield leaf
        elif isinstance(leaf, Mapping) and depth < 3:
            yield from _tensors(list(leaf.values()), depth + 1)
        elif depth < 3 and hasattr(leaf, "__dict__") and not isinstance(leaf, type | nn.Module):
            yield from _tensors(list(vars(leaf).values()), depth + 1)
