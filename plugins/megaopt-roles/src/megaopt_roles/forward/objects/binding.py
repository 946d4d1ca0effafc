"""What a call begins with: its local variables, and the method that `super()` means."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from megaopt_roles.forward.objects.alternatives import abstract
from megaopt_roles.forward.objects.attributes import Bound
from megaopt_roles.forward.objects.frames import Closure, Frame
from megaopt_roles.forward.sources.quiet import plain_copy
from megaopt_roles.forward.sources.trees import function_tree
from megaopt_roles.forward.values import Flow

__all__ = ["SuperMethod", "bind", "bind_closure", "is_super", "parent_method", "takes"]


class SuperMethod(Bound):
    """A method of a parent class: never taken for a call of the module itself."""


def bind(function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the local variables that a call of a plain function begins with.

    Args:
        function: the function.
        args: positional arguments.
        kwargs: keyword arguments.
    """
    tree = function_tree(function)
    if tree is None:
        return {}
    defaults = inspect.unwrap(function).__defaults__ or ()
    keyword_defaults = inspect.unwrap(function).__kwdefaults__ or {}
    parameters = [*tree.args.posonlyargs, *tree.args.args]
    names: dict[str, Any] = {}
    for parameter, default in zip(parameters[len(parameters) - len(defaults) :], defaults, strict=False):
        names[parameter.arg] = abstract(plain_copy(default))
    names.update({key: abstract(plain_copy(value)) for key, value in keyword_defaults.items()})
    for parameter, value in zip(parameters, args, strict=False):
        names[parameter.arg] = value
    known = {parameter.arg for parameter in (*parameters, *tree.args.kwonlyargs)}
    names.update({key: value for key, value in kwargs.items() if key in known})
    if tree.args.vararg is not None:
        names[tree.args.vararg.arg] = list(args[len(parameters) :])
    if tree.args.kwarg is not None:
        names[tree.args.kwarg.arg] = {key: value for key, value in kwargs.items() if key not in known}
    return names


def bind_closure(closure: Closure, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the local variables that a call of a lambda or a nested function begins with.

    Args:
        closure: what is called.
        args: positional arguments.
        kwargs: keyword arguments.
    """
    parameters = closure.node.args
    names = dict(zip((parameter.arg for parameter in parameters.args), args, strict=False))
    if parameters.vararg is not None:
        names[parameters.vararg.arg] = list(args[len(parameters.args) :])
    return {**names, **kwargs}


def takes(callee: Any) -> list[str]:
    """Return the names of the positional arguments that a call may give; none where that is not known.

    Args:
        callee: what is called: a function, a method, a lambda.
    """
    if isinstance(callee, Closure):
        return [parameter.arg for parameter in callee.node.args.args]
    bound = isinstance(callee, Bound) and callee.function is not None
    function = callee.function if bound else callee
    tree = function_tree(function) if inspect.isfunction(function) else None
    names = [] if tree is None else [parameter.arg for parameter in (*tree.args.posonlyargs, *tree.args.args)]
    return names[1 + len(callee.args) :] if bound else names


def parent_method(node: ast.expr, frame: Frame) -> Any:
    """Return the method that `super().name` means.

    Args:
        node: the expression.
        frame: the running function.
    """
    name = node.attr if isinstance(node, ast.Attribute) else ""
    tree = function_tree(frame.function)
    first = None if tree is None else next(iter([*tree.args.posonlyargs, *tree.args.args]), None)
    owner = None if first is None else frame.names.get(first.arg)
    if not isinstance(owner, nn.Module):
        return Flow()
    classes = list(type(owner).__mro__)
    code = getattr(frame.function, "__code__", None)
    for position, kind in enumerate(classes):
        own = vars(kind).get(frame.function.__name__)
        if inspect.isfunction(own) and inspect.unwrap(own).__code__ is code:
            classes = classes[position + 1 :]
            break
    function = next((vars(kind)[name] for kind in classes if name in vars(kind)), None)
    return SuperMethod(owner, function, name) if inspect.isfunction(function) else Flow()


def is_super(node: ast.expr) -> bool:
    """True for `super().name`.

    Args:
        node: any expression.
    """
    return (
        isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Call)
        and isinstance(node.value.func, ast.Name)
        and node.value.func.id == "super"
    )
