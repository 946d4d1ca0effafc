"""Evaluating calls: of child modules, of functions of torch, of plain Python functions."""

from __future__ import annotations

import ast
import functools
import inspect
import math
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd

from megaopt_core.params.role_rules.forward import ops
from megaopt_core.params.role_rules.forward.builtin_calls import BuiltinEvaluator
from megaopt_core.params.role_rules.forward.expressions import Closure, Frame
from megaopt_core.params.role_rules.forward.objects import (
    Bound,
    Choice,
    abstract,
    is_abstract,
    merge_values,
)
from megaopt_core.params.role_rules.forward.source import forward_of, function_tree
from megaopt_core.params.role_rules.forward.trace import BATCH
from megaopt_core.params.role_rules.forward.values import Flow, Weight, deps_of, flows_of, weights_of
from megaopt_core.params.role_rules.modules import is_conv1d, is_linear

__all__ = ["CallEvaluator"]

_PLAIN = (
    len, int, float, bool, str, abs, min, max, sum, round, hasattr, isinstance, issubclass, all, any, sorted, tuple,
    divmod, type, repr, slice, pow,
)  # fmt: skip
_LISTINGS = ("children", "named_children", "modules", "named_modules", "parameters", "named_parameters")
_DEEPEST = 12


class CallEvaluator(BuiltinEvaluator):
    """Evaluates calls; the bodies of functions are left to the subclass."""

    depth = 0

    @abstractmethod
    def run(self, function: Callable[..., Any], names: dict[str, Any]) -> Any:
        """Return what the body of a plain function returns."""

    @abstractmethod
    def run_closure(self, closure: Closure, names: dict[str, Any]) -> Any:
        """Return what a lambda or a nested function returns."""

    def call_node(self, node: ast.Call, frame: Frame) -> Any:
        """Return the value of a call expression."""
        if _is_super(node.func):
            callee: Any = self._super(node.func, frame)
        else:
            callee = self.evaluate(node.func, frame)
        self.trace.silent += _is_opaque(callee)
        try:
            args, kwargs = self._arguments(node, frame)
        finally:
            self.trace.silent -= _is_opaque(callee)
        result = self.call(callee, args, kwargs)
        self._in_place(node, result, frame)
        return result

    def _arguments(self, node: ast.Call, frame: Frame) -> tuple[list[Any], dict[str, Any]]:
        args = self._elements(node.args, frame)
        kwargs: dict[str, Any] = {}
        for keyword in node.keywords:
            value = self.evaluate(keyword.value, frame)
            if keyword.arg is not None:
                kwargs[keyword.arg] = value
            elif isinstance(value, dict):
                kwargs.update({str(key): item for key, item in value.items()})
        return args, kwargs

    def _in_place(self, node: ast.Call, result: Any, frame: Frame) -> None:
        """Note what a method that ends in an underscore did to its variable."""
        function = node.func
        if (
            isinstance(function, ast.Attribute)
            and function.attr.endswith("_")
            and not function.attr.startswith("__")
            and isinstance(function.value, ast.Name)
            and isinstance(frame.names.get(function.value.id), Flow)
            and isinstance(result, Flow)
        ):
            frame.names[function.value.id] = Flow(frame.names[function.value.id].deps | result.deps)

    def call(self, callee: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Return the result of a call."""
        self.trace.spend()
        if isinstance(callee, nn.Module):
            return self.call_module(callee, args, kwargs)
        if isinstance(callee, Choice):
            results = [self.call_module(module, args, kwargs) for module in callee.modules]
            return functools.reduce(merge_values, results)
        if isinstance(callee, Closure):
            return self.run_closure(callee, self._bind_closure(callee, args, kwargs))
        if isinstance(callee, functools.partial):
            return self.call(callee.func, [*map(abstract, callee.args), *args], {**callee.keywords, **kwargs})
        if isinstance(callee, Bound):
            return self._call_bound(callee, args, kwargs)
        if is_abstract(callee):
            return self._call_unread(callee, args, kwargs)
        return self._call_function(callee, args, kwargs)

    def call_module(self, module: nn.Module, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Return the output of a child module."""
        values = (list(args), kwargs)
        first = args[0] if args else next(iter(kwargs.values()), Flow())
        if isinstance(module, nn.Sequential) and forward_of(module) is nn.Sequential.forward:
            for child in module:
                first = self.call_module(child, [first], {})
            return first
        if is_linear(module) or is_conv1d(module) or isinstance(module, _ConvNd):
            return self._project(module, first, values)
        if not _has_params(module):
            return self._call_plain(module, first, args, kwargs)
        base = module._modules.get("base_layer")
        if base is not None and is_linear(base):  # an adapter around a layer
            return self._project(base, first, values, of=module)
        if self._worth_inlining(module, values):
            return self.inline(module, args, kwargs)
        self.trace.use_all(weights_of(values), "elementwise")
        return Flow(frozenset({self.trace.call(module, deps_of(values))}), self._shape_after(module, first))

    def inline(self, module: nn.Module, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Return the output of a child module by reading its forward."""
        forward = forward_of(module)
        if forward is None:
            return self.trace.unknown(args, kwargs)
        self.depth += 1
        try:
            return self.run(forward, self._bind(forward, [module, *args], kwargs))
        finally:
            self.depth -= 1

    def _worth_inlining(self, module: nn.Module, values: Any) -> bool:
        forward = forward_of(module)
        if forward is None or type(module).__module__.startswith("torch.") or self.depth > _DEEPEST:
            return False
        if function_tree(forward) is None:
            return False
        small = len(module._modules) <= 4 and not any(
            child._modules for child in module._modules.values() if child
        )
        return bool(weights_of(values)) or small

    def _project(self, module: nn.Module, first: Any, values: Any, of: nn.Module | None = None) -> Flow:
        self.trace.use_all(weights_of(values), "elementwise")
        call = self.trace.call(of or module, deps_of(values))
        weight = module._parameters.get("weight")
        if isinstance(module, _ConvNd):
            spatial = (4, 6, 7)[: len(module.kernel_size)]
            return self.trace.rows_of(module, module.out_channels, frozenset({call}), BATCH[:1], spatial)
        size = getattr(module, "out_features", None) or getattr(module, "nf", None)
        if size is None and weight is not None:
            size = weight.shape[0]
        if not isinstance(size, int):
            return Flow(frozenset({call}))
        return self.trace.rows_of(module, size, frozenset({call}), self.trace.leading(first))

    def _call_plain(self, module: nn.Module, first: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Return the output of a module without parameters."""
        kind = type(module)
        if isinstance(module, nn.GLU):
            return ops.operation(self.trace, "glu", [first, module.dim], {})
        if isinstance(module, nn.Identity | nn.Dropout) or kind.__module__ == "torch.nn.modules.activation":
            return ops.operation(self.trace, "relu", [first], {}) if is_abstract(first) else first
        if isinstance(module, nn.Flatten | nn.Unflatten) and isinstance(first, Flow):
            return Flow(first.deps)
        if (
            forward_of(module) is not None
            and self.depth < _DEEPEST
            and not kind.__module__.startswith("torch.")
        ):
            result = self.inline(module, args, kwargs)
            if deps_of(result) >= deps_of((args, kwargs)) or not deps_of((args, kwargs)):
                return result
        self.trace.use_all(weights_of((args, kwargs)), "elementwise")
        return self.trace.unknown(args, kwargs)

    def _shape_after(self, module: nn.Module, first: Any) -> torch.Tensor | None:
        tensor = first.tensor if isinstance(first, Flow) else None
        norm = isinstance(module, nn.LayerNorm | nn.GroupNorm | nn.RMSNorm) or "Norm" in type(module).__name__
        return tensor.to("meta") if norm and tensor is not None else None

    def _call_bound(self, method: Bound, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        owner = method.owner
        if isinstance(owner, nn.Module) and method.name in ("forward", "__call__"):
            own = forward_of(owner)
            if method.function is own or method.function is None:
                return self.call_module(owner, args, kwargs)
        if isinstance(owner, nn.Module) and method.name in _LISTINGS and not args:
            listed = getattr(owner, method.name)()
            return [
                tuple(map(abstract, item)) if isinstance(item, tuple) else abstract(item) for item in listed
            ]
        if method.function is not None:
            return self._call_python(method.function, [owner, *args], kwargs)
        if is_abstract(owner):
            if method.name == "size" and isinstance(owner, Flow | Weight):
                return self._size(owner, args, kwargs)
            if method.name in ("dim", "ndimension"):
                return self.read(owner, "ndim")
            return ops.operation(self.trace, method.name, [owner, *args], kwargs)
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
            try:
                return getattr(owner, name)(*args, **kwargs)
            except Exception:  # noqa: BLE001 - any container, any arguments
                return self.trace.unknown(owner, args, kwargs)
        return self.trace.unknown(args, kwargs)

    def _call_function(self, callee: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        special = getattr(self, f"_builtin_{getattr(callee, '__name__', '')}", None)
        if special is not None and getattr(callee, "__module__", None) == "builtins":
            return special(args, kwargs)
        module = getattr(callee, "__module__", None) or type(getattr(callee, "__self__", None)).__module__
        name = getattr(callee, "__name__", "")
        if name == "checkpoint" and args:
            return self.call(args[0], args[1:], {})
        plain = not (flows_of((args, kwargs)) or weights_of((args, kwargs)))
        if plain and (callee in _PLAIN or module in ("math", "_operator")):
            try:
                return abstract(callee(*args, **kwargs))
            except Exception:  # noqa: BLE001 - any function, any arguments
                return Flow()
        if callee is len or (callee in (int, float, max, min, math.prod) and args):
            return self.trace.unknown(*args) if callee is not len else Flow()
        if module.split(".")[0] in ("torch", "einops", "torch_scatter", "opt_einsum"):
            return ops.operation(self.trace, name.removesuffix("_default"), args, kwargs)
        if inspect.isfunction(callee):
            return self._call_python(callee, args, kwargs)
        if callee in (dict, list, tuple):
            return self._container(callee, args, kwargs)
        return self._call_unread(callee, args, kwargs)

    def _call_unread(self, callee: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Flow:
        """Return the result of a function that cannot be read."""
        self.trace.use_all(weights_of((args, kwargs)), "passed")
        return self.trace.unknown(callee, args, kwargs)

    def _call_python(self, function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        if self.depth > _DEEPEST or function_tree(function) is None:
            return self._call_unread(None, args, kwargs)
        self.depth += 1
        try:
            return self.run(inspect.unwrap(function), self._bind(function, args, kwargs))
        finally:
            self.depth -= 1

    def _bind(
        self, function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
    ) -> dict[str, Any]:
        """Return the local variables that a call begins with."""
        tree = function_tree(function)
        if tree is None:
            return {}
        defaults = inspect.unwrap(function).__defaults__ or ()
        keyword_defaults = inspect.unwrap(function).__kwdefaults__ or {}
        parameters = [*tree.args.posonlyargs, *tree.args.args]
        names: dict[str, Any] = {}
        for parameter, default in zip(parameters[len(parameters) - len(defaults) :], defaults, strict=False):
            names[parameter.arg] = abstract(default)
        names.update({key: abstract(value) for key, value in keyword_defaults.items()})
        for parameter, value in zip(parameters, args, strict=False):
            names[parameter.arg] = value
        known = {parameter.arg for parameter in (*parameters, *tree.args.kwonlyargs)}
        names.update({key: value for key, value in kwargs.items() if key in known})
        if tree.args.vararg is not None:
            names[tree.args.vararg.arg] = list(args[len(parameters) :])
        if tree.args.kwarg is not None:
            names[tree.args.kwarg.arg] = {key: value for key, value in kwargs.items() if key not in known}
        return names

    def _bind_closure(self, closure: Closure, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
        parameters = closure.node.args
        names = dict(zip((parameter.arg for parameter in parameters.args), args, strict=False))
        if parameters.vararg is not None:
            names[parameters.vararg.arg] = list(args[len(parameters.args) :])
        return {**names, **kwargs}

    def _super(self, node: ast.expr, frame: Frame) -> Any:
        """Return the method that `super().name` means."""
        name = node.attr if isinstance(node, ast.Attribute) else ""
        owner = frame.names.get("self")
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
        return _SuperMethod(owner, function, name) if inspect.isfunction(function) else Flow()


class _SuperMethod(Bound):
    """A method of a parent class: never taken for a call of the module itself."""


def _is_opaque(callee: Any) -> bool:
    """True for a call whose plain arguments change nothing: a method of something unknown, like a cache."""
    owner = callee.owner if isinstance(callee, Bound) else callee
    return isinstance(owner, Flow) and owner.tensor is None and owner.piece is None


def _is_super(node: ast.expr) -> bool:
    return (
        isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Call)
        and isinstance(node.value.func, ast.Name)
        and node.value.func.id == "super"
    )


def _has_params(module: nn.Module) -> bool:
    if module._parameters and any(param is not None for param in module._parameters.values()):
        return True
    return any(_has_params(child) for child in module._modules.values() if child is not None)
