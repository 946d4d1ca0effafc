"""Evaluating calls: their arguments, and what is called."""

from __future__ import annotations

import ast
import functools
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

from torch import nn

from megaopt_roles.forward.evaluation.function_calls import FunctionCallEvaluator
from megaopt_roles.forward.objects.alternatives import Choice, abstract
from megaopt_roles.forward.objects.attributes import Bound
from megaopt_roles.forward.objects.binding import bind_closure, is_super, parent_method, takes
from megaopt_roles.forward.objects.containers import entries
from megaopt_roles.forward.objects.frames import Closure, Frame
from megaopt_roles.forward.objects.transforms import Prepared
from megaopt_roles.forward.operations.functions import operation
from megaopt_roles.forward.sources import quiet
from megaopt_roles.forward.sources.module_classes import forward_of
from megaopt_roles.forward.values import Flow, Weight, deps_of, is_abstract

__all__ = ["CallEvaluator"]

_LISTINGS = ("children", "named_children", "modules", "named_modules", "parameters", "named_parameters")

_GROWS = ("append", "appendleft", "extend", "insert")
"""Methods of lists, which a forward may have been handed."""


def _holder(node: ast.expr) -> str:
    """Return the variable that holds what a method is called on, itself or as an item of an item; "" for others."""
    while isinstance(node, ast.Subscript):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


class CallEvaluator(FunctionCallEvaluator):
    """Evaluates calls; the bodies of functions are left to the subclass."""

    @abstractmethod
    def run_closure(self, closure: Closure, names: dict[str, Any]) -> Any:
        """Return what a lambda or a nested function returns."""

    def call_node(self, node: ast.Call, frame: Frame) -> Any:
        """Return the value of a call expression."""
        if is_super(node.func):
            callee: Any = parent_method(node.func, frame)
        else:
            callee = self.evaluate(node.func, frame)
        opaque = _is_opaque(callee)
        self.trace.silent += opaque
        try:
            args, kwargs = self._arguments(node, frame)
            args += self._more(node, frame, len(takes(callee)) - len(args))
        finally:
            self.trace.silent -= opaque
        self.trace.sites.append(node)
        try:
            result = self.call(callee, args, kwargs)
        finally:
            self.trace.sites.pop()
        self._in_place(node, result, frame)
        return result

    def _arguments(self, node: ast.Call, frame: Frame) -> tuple[list[Any], dict[str, Any]]:
        args = self._elements(node.args, frame)
        kwargs: dict[str, Any] = {}
        for keyword in node.keywords:
            value = self.evaluate(keyword.value, frame)
            if keyword.arg is not None:
                kwargs[keyword.arg] = value
            else:
                kwargs.update({str(key): item for key, item in (entries(value) or {}).items()})
        return args, kwargs

    def _more(self, node: ast.Call, frame: Frame, count: int) -> list[Any]:
        """Return what else a call hands over whose last argument spreads any number of them, up to a count."""
        match node.args:
            case [*_, ast.Starred(value=ast.Name() as spread)] if count > 0:
                value = self.evaluate(spread, frame)
                if isinstance(value, list) and self.is_uncounted(value):
                    return value[-1:] * count
        return []

    def _in_place(self, node: ast.Call, result: Any, frame: Frame) -> None:
        """Note what a method that ends in an underscore did to its variable, or one that puts more into a list."""
        function = node.func
        if (
            isinstance(function, ast.Attribute)
            and (function.attr.endswith("_") or function.attr in _GROWS)
            and not function.attr.startswith("__")
            and isinstance(result, Flow)
        ):
            name = _holder(function.value)
            held = frame.names.get(name)
            if isinstance(held, Flow) or (isinstance(held, list | dict) and function.attr in _GROWS):
                before = () if function.attr == "detach_" else held
                frame.names[name] = Flow(deps_of((before, result)), one_hot=result.one_hot)
        for keyword in node.keywords:
            if keyword.arg == "out" and isinstance(keyword.value, ast.Name):
                frame.names[keyword.value.id] = result

    def call(self, callee: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Return the result of a call."""
        self.trace.spend()
        if isinstance(callee, nn.Module):
            return self.call_module(callee, args, kwargs)
        if isinstance(callee, Choice):
            return self._either([self.call_module(module, args, kwargs) for module in callee.modules])
        if isinstance(callee, Closure):
            return self.run_closure(callee, bind_closure(callee, args, kwargs))
        if isinstance(callee, functools.partial):
            bound = {key: abstract(value) for key, value in callee.keywords.items()}
            callee = Prepared(callee.func, tuple(map(abstract, callee.args)), bound)
        if isinstance(callee, Prepared):
            made = self.call(callee.function, callee.arguments(args), {**callee.kwargs, **kwargs})
            return made if callee.finish is None else callee.finish(made, callee.arguments(args))
        if isinstance(callee, Bound):
            return self._call_bound(callee, args, kwargs)
        if is_abstract(callee):
            return self._call_unread(callee, args, kwargs)
        return self._call_function(callee, args, kwargs)

    def _call_bound(self, method: Bound, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        owner = method.owner
        if isinstance(owner, nn.Module) and method.name in ("forward", "__call__"):
            own = forward_of(owner)
            if method.function is own or method.function is None:
                return self.call_module(owner, args, kwargs)
        if isinstance(owner, nn.Module) and method.name in _LISTINGS and not args and _lists_plainly(owner):
            listed = getattr(nn.Module, method.name)(owner)
            return [
                tuple(map(abstract, item)) if isinstance(item, tuple) else abstract(item) for item in listed
            ]
        if method.function is not None:
            given = [owner, *method.args, *args]
            return self._call_python(method.function, given, {**method.kwargs, **kwargs})
        if is_abstract(owner):
            if method.name == "size" and isinstance(owner, Flow | Weight):
                return self._size(owner, args, kwargs)
            if method.name in ("dim", "ndimension"):
                return self.read(owner, "ndim")
            if method.name == "is_floating_point" and isinstance(owner, Weight):
                return True  # it has a gradient
            return operation(self.trace, method.name, [owner, *args], kwargs)
        return self._container_method(owner, method.name, args, kwargs)

    def _size(self, owner: Flow | Weight, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        shape = self.read(owner, "shape")
        which = args[0] if args else kwargs.get("dim")
        if which is None or not isinstance(shape, tuple):
            return shape
        return shape[which] if isinstance(which, int) and -len(shape) <= which < len(shape) else Flow()

    def _container_method(self, owner: Any, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        if isinstance(owner, list | dict | set | str | tuple):
            if isinstance(owner, dict) and name == "get" and args and is_abstract(args[0]):
                return self._either(list(owner.values()))
            if not all(map(_is_harmless, (*args, *kwargs.values()))):
                return self.trace.unknown(owner, args, kwargs)
            try:
                return getattr(owner, name)(*args, **kwargs)
            except Exception:  # noqa: BLE001 - any container, any arguments
                return self.trace.unknown(owner, args, kwargs)
        return self.trace.unknown(args, kwargs)


def _lists_plainly(module: nn.Module) -> bool:
    """True for a module that lists its children and parameters as torch does."""
    return all(getattr(type(module), name) is getattr(nn.Module, name) for name in _LISTINGS)


def _is_harmless(value: Any) -> bool:
    """True for what a list or a dictionary may be handed without running its code."""
    if isinstance(value, list | tuple):
        return all(map(_is_harmless, value))
    known = is_abstract(value) or isinstance(value, nn.Module | Bound | Choice | Closure | dict)
    return known or quiet.is_plain(value)


def _is_opaque(callee: Any) -> bool:
    """True for a call whose plain arguments change nothing: a method of something unknown, like a cache."""
    owner = callee.owner if isinstance(callee, Bound) else callee
    return isinstance(owner, Flow) and owner.tensor is None and owner.piece is None
