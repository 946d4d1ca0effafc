"""Functions of autograd that a model brings along: their forward is Python, and is read like any other."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from attrs import evolve

from megaopt_roles.forward.dependencies import Call, is_mark
from megaopt_roles.forward.sources.module_classes import home_of
from megaopt_roles.forward.sources.trees import function_tree
from megaopt_roles.forward.values import Flow, deps_of

__all__ = ["Context", "forward_of_function", "kept_in_sight", "takes_context"]


class Context:
    """Stands for the `ctx` of an autograd function: it keeps what is set on it, and its methods do nothing."""

    needs_input_grad = Flow()
    saved_tensors = Flow()

    def save_for_backward(self, *tensors: Any) -> None:
        """Keep nothing: only a backward pass would ask."""

    save_for_forward = mark_dirty = mark_non_differentiable = set_materialize_grads = save_for_backward


def forward_of_function(kind: type) -> Callable[..., Any] | None:
    """Return the forward of an autograd function; None where it is torch's own, or has no source.

    Args:
        kind: the class.
    """
    if not issubclass(kind, torch.autograd.Function) or home_of(kind).partition(".")[0] == "torch":
        return None
    forward = inspect.getattr_static(kind, "forward", None)
    forward = forward.__func__ if isinstance(forward, staticmethod) else forward
    return forward if inspect.isfunction(forward) and function_tree(forward) is not None else None


def takes_context(kind: type[torch.autograd.Function]) -> bool:
    """True for a function whose forward takes `ctx`: it has no `setup_context` of its own.

    Args:
        kind: the class.
    """
    return kind.setup_context is torch.autograd.Function.setup_context


def kept_in_sight(result: Any, given: Sequence[Any], made: Sequence[Call]) -> Any:
    """Return the result of a forward, with what it must come from where a kernel wrote it into a new tensor.

    Args:
        result: what the forward returned, as far as it was read.
        given: its arguments.
        made: the calls that were seen in it.
    """
    before = frozenset(dep for dep in deps_of(given) if not is_mark(dep))
    known = before.union(made)
    if not known and isinstance(result, Flow) and not result.deps:
        return evolve(result, deps=deps_of(given))  # a step of what is given, say
    if not known or deps_of(result) & known:
        return result
    taken = frozenset[Any]().union(*(call.deps for call in made))
    lost = frozenset(call for call in made if call not in taken) or before
    if isinstance(result, Flow):
        return evolve(result, deps=result.deps | lost, held=())
    return Flow(deps_of(result) | lost)
