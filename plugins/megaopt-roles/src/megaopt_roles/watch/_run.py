"""Runs a forward once: on the meta device where that is possible, else on the model's own values."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from attrs import frozen
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributions import Distribution
from torch.utils._pytree import tree_iter, tree_map_only

from megaopt_core.params import named_modules, unwrap
from megaopt_roles.watch._notes import Notes
from megaopt_roles.watch._recorder import CommunicationError, Recorder
from megaopt_roles.watch._values import Met, Value

__all__ = ["Watched", "watch"]


@frozen
class Watched:
    """The record of one forward, or why none could be run.

    Args:
        notes: what it showed; None: it could not be run.
        why_not: the reason, in words.
    """

    notes: Notes | None
    why_not: str = ""


def watch(model: nn.Module, example: Any, layers: frozenset[int] = frozenset()) -> Watched:
    """Run one forward and watch what becomes of every parameter.

    On the meta device nothing is computed. Where the forward needs numbers on the host, it runs once on the model's own
    values, unless the model is wrapped or lies on several ranks: then it would communicate. Mode, buffers and random
    generators are as before.

    Args:
        model: the model, unwrapped.
        example: a batch: a tensor, a tuple of positional arguments, or a mapping of keyword arguments.
        layers: the weights of layers, by identity: these project whatever they are given.
    """
    if any(unwrap(part) is not part for part in model.modules()):
        return Watched(None, "a part of the model is wrapped for data parallelism, and would communicate")
    held = dict(_held(model))
    stands: list[tuple[str, Callable[[torch.Tensor], torch.Tensor]]] = [
        ("on the meta device", _on_meta),
        ("on the meta device in bf16", _on_meta_in_bf16),
    ]
    local = not any(tensor.is_meta or isinstance(tensor, DTensor) for tensor in held.values())
    if local:
        stands.append(("on its values", _own))
    faults = []
    for where, stand_in in stands:
        try:
            return Watched(_seen(model, held, example, stand_in, Notes(layers=layers)))
        except CommunicationError as error:
            return Watched(None, str(error))
        except Exception as error:  # noqa: BLE001 - a forward may do anything
            said = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:150]}"
            faults.append(f"{where}: {said}")
    return Watched(None, f"its forward could not be run {'; '.join([faults[0], *faults[2:]])}")


def _seen(
    model: nn.Module,
    held: Mapping[str, torch.Tensor],
    example: Any,
    stand_in: Callable[[torch.Tensor], torch.Tensor],
    notes: Notes,
) -> Notes:
    """Run a model on an example with something in the place of all that it holds, and return what was seen."""
    on_meta = stand_in is not _own
    made: dict[int, torch.Tensor] = {}
    for tensor in held.values():
        is_param = isinstance(tensor, nn.Parameter)
        made.setdefault(id(tensor), stand_in(tensor) if is_param or on_meta else tensor.clone())
    given = tree_map_only(torch.Tensor, stand_in if on_meta else lambda tensor: tensor, example)
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = {}
    if isinstance(given, Mapping):
        kwargs = dict(given)
    else:
        args = tuple(given) if isinstance(given, tuple | list) else (given,)
    seen = Recorder(notes, on_meta=on_meta)
    for param in model.parameters():
        seen.add_param(param, made[id(param)])
    for tensor in _tensors((args, kwargs)):
        seen.put(tensor, Value(makers=frozenset()))
    with torch.no_grad(), _undisturbed(seen), _places(model, notes), _without_hooks(model), seen:
        # What is tied has one stand-in already; tied by torch, a module of two names would be filled twice.
        stands = {name: made[id(tensor)] for name, tensor in held.items()}
        result = torch.func.functional_call(model, stands, args, kwargs, tie_weights=False)
        for tensor in _tensors(result):
            makers = seen.of(tensor).makers or frozenset()
            if tensor.dim() == 0:  # a loss that balances experts returns no gate
                makers = frozenset((param, Met.JOINED if met is Met.GATED else met) for param, met in makers)
            notes.ends |= makers
    return notes


@contextmanager
def _undisturbed(seen: Recorder) -> Iterator[None]:
    """Run layers operator by operator, and put back random generators; gradients in a forward are zeros."""
    checks, grad = Distribution._validate_args, torch.autograd.grad
    numpy = sys.modules.get("numpy")
    generators = random.getstate(), None if numpy is None else numpy.random.get_state()
    fused: list[Any] = [torch.backends.mkldnn, torch.backends.cudnn]
    enabled, fast = [library.enabled for library in fused], torch.backends.mha.get_fastpath_enabled()

    def gradients(outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, ...]:
        found = tuple(torch.zeros_like(tensor) for tensor in tree_iter(inputs))
        seen.derive(tree_iter(outputs), found)
        return found

    try:
        Distribution.set_default_validate_args(False)
        torch.autograd.grad = gradients  # type: ignore[assignment]  # for this one forward
        torch.backends.mha.set_fastpath_enabled(False)
        for library in fused:
            library.enabled = False
        with torch.random.fork_rng(range(torch.cuda.device_count()) if torch.cuda.is_initialized() else []):
            yield
    finally:
        Distribution.set_default_validate_args(checks)
        torch.autograd.grad = grad
        torch.backends.mha.set_fastpath_enabled(fast)
        for library, was in zip(fused, enabled, strict=True):
            library.enabled = was
        random.setstate(generators[0])
        if numpy is not None:
            numpy.random.set_state(generators[1])


@contextmanager
def _places(model: nn.Module, notes: Notes) -> Iterator[None]:
    """Keep in the notes which module's forward runs."""
    names = {id(module): name for name, module in reversed(list(named_modules(model)))}
    stack = [""]

    def enter(module: nn.Module, *_: Any) -> None:
        stack.append(names.get(id(module), stack[-1]))
        notes.place = stack[-1]

    def leave(module: nn.Module, *_: Any) -> None:
        stack.pop()
        notes.place = stack[-1]

    before = nn.modules.module.register_module_forward_pre_hook(enter)
    after = nn.modules.module.register_module_forward_hook(leave, always_call=True)
    try:
        yield
    finally:
        before.remove()
        after.remove()


@contextmanager
def _without_hooks(model: nn.Module) -> Iterator[None]:
    """Leave out hooks of torch.distributed: they would gather or convert what has a whole stand-in here."""
    kept = []
    for module in model.modules():
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            theirs = [k for k, hook in hooks.items() if _is_distributed(hook)]
            if theirs:
                kept.append((hooks, dict(hooks)))
                for key in theirs:
                    del hooks[key]
    try:
        yield
    finally:
        for hooks, before in kept:
            hooks.clear()
            hooks.update(before)


def _is_distributed(hook: Any) -> bool:
    return str(getattr(hook, "__module__", "")).startswith("torch.distributed")


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


def _on_meta_in_bf16(tensor: torch.Tensor) -> torch.Tensor:
    stand_in = _on_meta(tensor)
    return stand_in.bfloat16() if tensor.dtype == torch.float32 else stand_in


def _own(param: torch.Tensor) -> torch.Tensor:
    return param.detach()


def _tensors(value: Any, depth: int = 0) -> Iterator[torch.Tensor]:
    """Yield the tensors inside a result, through containers and objects that hold them as attributes."""
    for leaf in tree_iter(value):
        if isinstance(leaf, torch.Tensor):
            yield leaf
        elif isinstance(leaf, Mapping) and depth < 3:
            yield from _tensors(list(leaf.values()), depth + 1)
        elif depth < 3 and hasattr(leaf, "__dict__") and not isinstance(leaf, type | nn.Module):
            yield from _tensors(list(vars(leaf).values()), depth + 1)
