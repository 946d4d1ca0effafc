"""Gradients: of a weight, which moves it, and of what was given, which may be what a model returns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from attrs import evolve
from torch import nn

from megaopt_roles.forward.dependencies import Part, call_behind, is_mark
from megaopt_roles.forward.operations.arguments import argument
from megaopt_roles.forward.sources import quiet
from megaopt_roles.forward.trace import Trace
from megaopt_roles.forward.values import Flow, Weight, deps_of

__all__ = ["grad", "gradient"]


def grad(trace: Trace, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Return `torch.autograd.grad(outputs, inputs)`: a gradient for each of the inputs."""
    inputs = argument(1, "inputs", args, kwargs)
    made = gradient(trace, argument(0, "outputs", args, kwargs), inputs)
    return [made] if isinstance(inputs, Weight) else made


def gradient(trace: Trace, outputs: Any, inputs: Any) -> Any:
    """Return the gradients of something with respect to each of several values.

    That of a weight says nothing of other weights: what it was moved along stays that weight. That of an activation
    comes from the layers that made the outputs, but no layer that takes it takes their outputs.

    Args:
        trace: where the calls are noted that made the outputs.
        outputs: what the gradients are of.
        inputs: what they are with respect to, in containers or not.
    """
    if isinstance(inputs, dict):
        return {key: gradient(trace, outputs, item) for key, item in inputs.items()}
    items = quiet.items(inputs)
    if items is not None:
        return [gradient(trace, outputs, item) for item in items]
    if isinstance(inputs, Weight | nn.Parameter):
        return Flow(noise=True)
    return Flow(frozenset(_slope(trace, dep) for dep in deps_of(outputs) if not is_mark(dep)))


def _slope(trace: Trace, dep: Any) -> Any:
    call = evolve(call_behind(dep), slope=True)
    trace.calls.append(call)
    return Part(call, dep.index) if isinstance(dep, Part) else call
