"""Evaluating calls: of child modules, of functions of torch, of plain Python functions."""

from __future__ import annotations

import ast
import functools
import inspect
import itertools
import sys
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from attrs import evolve
from torch import nn

from megaopt_core.params import named_modules
from megaopt_roles.forward.dependencies import is_mark
from megaopt_roles.forward.expressions import Closure, Frame
from megaopt_roles.forward.module_calls import DEEPEST, ModuleCallEvaluator
from megaopt_roles.forward.objects.alternatives import Choice, abstract, merge_values
from megaopt_roles.forward.objects.attributes import Bound
from megaopt_roles.forward.objects.autograd_functions import (
    Context,
    forward_of_function,
    kept_in_sight,
    takes_context,
)
from megaopt_roles.forward.objects.binding import bind, bind_closure, is_super, parent_method
from megaopt_roles.forward.objects.containers import entries, items_of
from megaopt_roles.forward.objects.lent_weights import lent_to
from megaopt_roles.forward.objects.transforms import TRANSFORMS, Prepared
from megaopt_roles.forward.operations import aten
from megaopt_roles.forward.operations.arguments import argument
from megaopt_roles.forward.operations.functions import is_known, operation
from megaopt_roles.forward.sources import quiet
from megaopt_roles.forward.sources.gradients import is_cut_off
from megaopt_roles.forward.sources.module_classes import forward_of, home_of
from megaopt_roles.forward.sources.trees import function_tree
from megaopt_roles.forward.values import Flow, Weight, deps_of, flows_of, is_abstract, weights_of
from megaopt_roles.forward.weights import noise
from megaopt_roles.forward.weights.noise import density

__all__ = ["CallEvaluator"]

_PLAIN = (
    int, float, bool, str, abs, min, max, sum, round, all, any, divmod, repr, slice, pow,
)  # fmt: skip
_LIBRARIES = ("torch", "einops", "torch_scatter", "opt_einsum")
_TENSOR = torch.Tensor.__mro__[1]
_SEQUENCES = (itertools.chain, itertools.pairwise, itertools.product, itertools.zip_longest)
_OPERATORS = {"matmul": ast.MatMult, "add": ast.Add, "sub": ast.Sub, "mul": ast.Mult, "truediv": ast.Div}
_LISTINGS = ("children", "named_children", "modules", "named_modules", "parameters", "named_parameters")

_GROWS = ("append", "appendleft", "extend", "insert")
"""Methods of lists, which a forward may have been handed."""


def _holder(node: ast.expr) -> str:
    """Return the variable that holds what a method is called on, itself or as an item of an item; "" for others."""
    while isinstance(node, ast.Subscript):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


class CallEvaluator(ModuleCallEvaluator):
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
        self.trace.silent += _is_opaque(callee)
        try:
            args, kwargs = self._arguments(node, frame)
        finally:
            self.trace.silent -= _is_opaque(callee)
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
            results = [self.call_module(module, args, kwargs) for module in callee.modules]
            return functools.reduce(merge_values, results)
        if isinstance(callee, Closure):
            return self.run_closure(callee, bind_closure(callee, args, kwargs))
        if isinstance(callee, functools.partial):
            bound = {key: abstract(value) for key, value in callee.keywords.items()}
            callee = Prepared(callee.func, tuple(map(abstract, callee.args)), bound)
        if isinstance(callee, Prepared):
            return self.call(callee.function, callee.arguments(args), {**callee.kwargs, **kwargs})
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

    def _call_function(self, callee: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        if inspect.ismethod(callee):
            return self.call(Bound(callee.__self__, callee.__func__, callee.__name__), args, kwargs)
        if home_of(type(callee)).partition(".")[0] not in ("builtins", "functools", "abc", "enum", "torch"):
            return self._call_object(callee, args, kwargs)
        module = getattr(callee, "__module__", None) or home_of(type(getattr(callee, "__self__", None)))
        name = getattr(callee, "__name__", "")
        special = getattr(self, f"_builtin_{name}", None)
        if special is not None and module == "builtins":
            return special(args, kwargs)
        transform = TRANSFORMS.get((module.partition(".")[0], name)) if args else None
        if transform is not None:
            return transform(self.call, self.trace, args, kwargs)
        if module in ("_operator", "itertools"):
            return self._call_of_python(callee, name, args, kwargs)
        if callee in _PLAIN or module == "math":
            return self._call_plain_function(callee, args, kwargs)
        if module.split(".")[0] in _LIBRARIES or getattr(callee, "__objclass__", None) is _TENSOR:
            return self._call_torch(callee, name, module, args, kwargs)
        if module.startswith("torchvision.ops.") and is_known(name):
            return operation(self.trace, name, args, kwargs)
        if inspect.isfunction(callee):
            return self._call_python(callee, args, kwargs)
        return self._call_unread(callee, args, kwargs)

    def _functional_call(self, module: nn.Module, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Return what a module returns with other weights: its own, changed, or any that it is handed."""
        given = argument(1, "parameters_and_buffer_dicts", args, kwargs)
        values = argument(2, "args", args, kwargs)
        values = values if isinstance(values, list | tuple) else [] if values is None else [values]
        keywords = argument(3, "kwargs", args, kwargs) or {}
        inside = dict(named_modules(module))
        params = [
            param for part in inside.values() for param in part._parameters.values() if param is not None
        ]
        own, made = set(map(id, params)), deps_of(given)
        if params and not all(map(is_mark, made)):  # layers made weights: these products take their output
            self.trace.call(params[0], made)
        lent = lent_to(inside, given, own)
        if lent is not None:
            return self.call_with(module, lent, values, keywords)
        self.trace.use_all((weight for weight in weights_of(given) if id(weight.base) not in own), "passed")
        return self.call(module, values, keywords)

    def _call_of_python(self, callee: Any, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Return the result of a function of `operator`, or what a loop over one of `itertools` sees."""
        if callee in _SEQUENCES:
            return [*callee(*(items_of(self.trace, arg) for arg in args))]
        if callee is itertools.islice and args and all(map(quiet.is_plain, args[1:])):
            return [*itertools.islice(items_of(self.trace, args[0]), *args[1:])]
        if name in _OPERATORS and len(args) > 1:
            return self.binary(_OPERATORS[name], *args[:2])
        return self._call_plain_function(callee, args, kwargs)

    def _call_object(self, callee: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Return the result of an object that is called: what its class says."""
        own = None if isinstance(callee, type) else inspect.getattr_static(type(callee), "__call__", None)
        if inspect.isfunction(own):
            return self._call_python(own, [callee, *args], kwargs)
        return self._call_unread(None, args, kwargs)

    def _call_plain_function(self, callee: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Return the result of one of Python's functions, of numbers and strings."""
        if not (quiet.is_plain(list(args)) and quiet.is_plain(kwargs)):
            return self.trace.unknown(args, kwargs)
        try:
            return abstract(callee(*args, **kwargs))
        except Exception:  # noqa: BLE001 - any function, any arguments
            return Flow()

    def _call_torch(
        self, callee: Any, name: str, module: str, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> Any:
        """Return the result of a function of torch, or of a library of operations on tensors."""
        owner = getattr(callee, "__self__", None)
        if name == "apply" and isinstance(owner, type):
            return self._apply(owner, args, kwargs)
        if name == "functional_call" and args and isinstance(args[0], nn.Module):
            return self._functional_call(args[0], args, kwargs)
        if module.startswith("torch.distributions"):  # of the values that it is given, entry by entry
            if name in noise.DENSITIES:
                return density(self.trace, args, kwargs)
            return noise.distribution(self.trace, name, args, kwargs)
        if module.startswith("torch._ops"):
            name, args = aten.as_function(name, args)
        return operation(self.trace, name.removesuffix("_default").removeprefix("linalg_"), args, kwargs)

    def _apply(self, kind: type, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Return the result of a function of autograd: what its forward says, where that can be read."""
        forward = forward_of_function(kind)
        if forward is None:
            return self._call_unread(None, args, kwargs)
        before = len(self.trace.calls)
        context = [Context()] if takes_context(kind) else []
        self.kept += context
        result = self._call_python(forward, [*context, *args], kwargs)
        return kept_in_sight(result, args, self.trace.calls[before:])

    def _call_unread(self, callee: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Flow | Weight:
        """Return the result of a function that cannot be read."""
        found = weights_of((args, kwargs))
        if len(found) == 1 and not any(flow.deps for flow in flows_of((args, kwargs))):
            return found[0]  # a function of a weight alone: quantized, masked, gathered
        made = self.trace.passed(found, callee, args, kwargs)
        if isinstance(callee, type):  # an object that holds what it is made of
            return evolve(made, held=tuple(map(deps_of, (*args, *kwargs.values()))))
        return made

    def _call_python(self, function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        nested = sum(function is other for other in self.running)
        standard = (getattr(function, "__module__", None) or "").partition(".")[0] in sys.stdlib_module_names
        if nested > 1 or standard or len(self.running) > DEEPEST or function_tree(function) is None:
            return self._call_unread(None, args, kwargs)
        self.running.append(function)
        cut = is_cut_off(function)
        self.trace.cut_off += cut
        try:
            return self.run(inspect.unwrap(function), bind(function, args, kwargs))
        finally:
            self.trace.cut_off -= cut
            self.running.pop()


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
