"""Reading a forward with what its arguments probably are."""

from __future__ import annotations

import ast
import math
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd

from megaopt_core.routing import is_conv1d, is_linear, is_projection
from megaopt_roles.forward.dependencies import ARGUMENT
from megaopt_roles.forward.evaluation.statements import Evaluator
from megaopt_roles.forward.sources.module_classes import forward_of
from megaopt_roles.forward.sources.trees import function_tree
from megaopt_roles.forward.trace import BATCH, PLACES, Trace
from megaopt_roles.forward.values import Flow

__all__ = ["run_forward"]

_HINT_BUDGET = 5_000
"""Steps that the shape of an input is worth: what takes it stands early in a forward."""


def run_forward(
    evaluator: Evaluator, module: nn.Module, function: Callable[..., Any], *, shaped: bool = True
) -> Any:
    """Return what a method of a module returns; None where its source is not there.

    Args:
        evaluator: what reads it.
        module: whose method it is.
        function: the method.
        shaped: its first argument has a shape, which is guessed.
    """
    tree = function_tree(function)
    if tree is None:
        return None
    names: dict[str, Any] = {}
    parameters = [*tree.args.posonlyargs, *tree.args.args, *tree.args.kwonlyargs]
    for parameter in parameters:
        names[parameter.arg] = Flow(frozenset({ARGUMENT}))
    for name in _numbers(tree.args):
        names[name] = Flow(frozenset({ARGUMENT}), torch.empty((), device="meta"))
    if parameters:
        names[parameters[0].arg] = module
    if len(parameters) > 1 and evaluator.trace.changes is not None:
        names[parameters[1].arg] = evaluator.trace.changes
    elif len(parameters) > 1 and shaped:
        shape = _input_shape(module, evaluator.trace)
        names[parameters[1].arg] = Flow(frozenset({ARGUMENT}), torch.empty(shape, device="meta"))
    if tree.args.vararg is not None:
        names[tree.args.vararg.arg] = evaluator.as_uncounted([Flow(frozenset({ARGUMENT}))])
    if tree.args.kwarg is not None:
        names[tree.args.kwarg.arg] = {}
    return evaluator.run(function, names)


def _numbers(arguments: ast.arguments) -> set[str]:
    """Return the arguments that are numbers where nobody gives them: a scale, say."""
    positional = [*arguments.posonlyargs, *arguments.args]
    defaults = [
        *zip(positional[::-1], arguments.defaults[::-1], strict=False),
        *zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True),
    ]
    return {
        parameter.arg
        for parameter, default in defaults
        if isinstance(default, ast.Constant) and type(default.value) is float
    }


def _input_shape(module: nn.Module, trace: Trace) -> tuple[int, ...]:
    """Return the shape that the first argument probably has: what takes it first expects."""
    rank = trace.rank
    children = [module, *(child for child in module._modules.values() if child is not None)]
    own = [param for param in module._parameters.values() if param is not None and param.dim() > 1]
    mixed = len({isinstance(child, _ConvNd) for child in children if is_projection(child)}) > 1
    by_hand = bool(own) and not is_projection(module)
    first: nn.Module | int | None = None
    if mixed or by_hand:
        if id(module) not in trace.takers:
            trace.takers[id(module)] = _first_taker(module)
        first = trace.takers[id(module)]
    if isinstance(first, int):
        return (*BATCH[: rank - 1], first)
    for child in children if first is None else [first, *children]:
        if isinstance(child, _ConvNd):
            return (BATCH[0], child.in_channels, *PLACES[: len(child.kernel_size)])
        weight = child._parameters.get("weight")
        if weight is not None and (is_linear(child) or is_conv1d(child)):
            return (*BATCH[: rank - 1], weight.shape[1 if is_linear(child) else 0])
    held = [param for param in module._parameters.values() if param is not None and param.dim()]
    gains = [child._parameters.get("weight") for child in children[1:]]
    held += [gain for gain in gains if gain is not None and gain.dim() == 1]  # of norms
    return (*BATCH[: rank - 1], next((param.shape[-1] for param in held), 8))


def _first_taker(module: nn.Module) -> nn.Module | int | None:
    """Return the projection that takes the input first, or the width that a weight used by hand takes."""
    forward, trace = forward_of(module), Trace(budget=_HINT_BUDGET)
    evaluator = Evaluator(trace)
    if forward is not None:
        with suppress(Exception):  # it is a hint about a shape, no more
            run_forward(evaluator, module, forward, shaped=False)
    for call in trace.calls:
        if isinstance(call.module, nn.Module) and is_projection(call.module):
            return call.module
        if isinstance(call.module, nn.Parameter):
            sizes = {use.inputs for use in trace.uses.get(id(call.module), ()) if use.inputs}
            if len(sizes) == 1:
                return math.prod(call.module.shape[axis] for axis in sizes.pop())
    return None
