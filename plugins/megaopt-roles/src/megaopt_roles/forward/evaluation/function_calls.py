"""Evaluating calls of functions: of torch, of Python's own, and of those whose source is read."""

from __future__ import annotations

import ast
import copy
import inspect
import itertools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from attrs import asdict, evolve
from torch import nn

from megaopt_core.params import named_modules
from megaopt_roles.forward.dependencies import is_mark
from megaopt_roles.forward.evaluation.layer_calls import DEEPEST
from megaopt_roles.forward.evaluation.module_calls import ModuleCallEvaluator
from megaopt_roles.forward.objects.alternatives import abstract
from megaopt_roles.forward.objects.attributes import Bound
from megaopt_roles.forward.objects.autograd_functions import (
    Context,
    forward_of_function,
    kept_in_sight,
    takes_context,
)
from megaopt_roles.forward.objects.binding import bind
from megaopt_roles.forward.objects.containers import items_of
from megaopt_roles.forward.objects.lent_weights import lent_to
from megaopt_roles.forward.objects.transforms import TRANSFORMS
from megaopt_roles.forward.operations import aten
from megaopt_roles.forward.operations.arguments import argument
from megaopt_roles.forward.operations.functions import is_known, operation
from megaopt_roles.forward.sources import quiet
from megaopt_roles.forward.sources.gradients import is_cut_off
from megaopt_roles.forward.sources.module_classes import home_of
from megaopt_roles.forward.sources.trees import function_tree
from megaopt_roles.forward.values import Flow, Weight, deps_of, flows_of, weights_of
from megaopt_roles.forward.weights import noise
from megaopt_roles.forward.weights.noise import density

__all__ = ["FunctionCallEvaluator"]

_PLAIN = (
    int, float, bool, str, abs, min, max, sum, round, all, any, divmod, repr, slice, pow,
)  # fmt: skip
_LIBRARIES = ("torch", "einops", "torch_scatter", "opt_einsum")
_TENSOR = torch.Tensor.__mro__[1]
_SEQUENCES = (itertools.chain, itertools.pairwise, itertools.product, itertools.zip_longest)
_OPERATORS = {"matmul": ast.MatMult, "add": ast.Add, "sub": ast.Sub, "mul": ast.Mult, "truediv": ast.Div}


class FunctionCallEvaluator(ModuleCallEvaluator):
    """Evaluates calls of functions."""

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
        if module in ("_operator", "itertools") or _is_chain_of_all(callee):
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

    def _call_of_python(self, callee: Any, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Return the result of a function of `operator`, or what a loop over one of `itertools` sees."""
        if callee in _SEQUENCES:
            return [*callee(*(items_of(self.trace, arg) for arg in args))]
        if _is_chain_of_all(callee) and args:
            return [*itertools.chain(*(items_of(self.trace, part) for part in items_of(self.trace, args[0])))]
        if callee is itertools.islice and args and all(map(quiet.is_plain, args[1:])):
            return [*itertools.islice(items_of(self.trace, args[0]), *args[1:])]
        if name in _OPERATORS and len(args) > 1:
            return self.binary(_OPERATORS[name], *args[:2])
        return self._call_plain_function(callee, args, kwargs)

    def _call_plain_function(self, callee: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Return the result of one of Python's functions, of numbers and strings."""
        if not (quiet.is_plain(list(args)) and quiet.is_plain(kwargs)):
            return self.trace.unknown(args, kwargs)
        try:
            return abstract(callee(*args, **kwargs))
        except Exception:  # noqa: BLE001 - any function, any arguments
            return Flow()

    def _call_object(self, callee: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Return the result of an object that is called: what its class says."""
        own = None if isinstance(callee, type) else inspect.getattr_static(type(callee), "__call__", None)
        if inspect.isfunction(own):
            return self._call_python(own, [callee, *args], kwargs)
        return self._call_unread(None, args, kwargs)

    def _call_torch(
        self, callee: Any, name: str, module: str, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> Any:
        """Return the result of a function of torch, or of a library of operations on tensors."""
        owner = getattr(callee, "__self__", None)
        if name == "apply" and isinstance(owner, type):
            return self._apply(owner, args, kwargs)
        if callee is nn.Module.__call__ and args and isinstance(args[0], nn.Module):
            return self.call(args[0], args[1:], kwargs)
        if name == "functional_call" and args and isinstance(args[0], nn.Module):
            return self._functional_call(args[0], args, kwargs)
        if module.startswith("torch.distributions"):  # of the values that it is given, entry by entry
            if name in noise.DENSITIES:
                return density(self.trace, args, kwargs)
            return noise.distribution(self.trace, name, args, kwargs)
        if module.startswith("torch._ops"):
            name, args = aten.as_function(name, args)
        return operation(self.trace, name.removesuffix("_default").removeprefix("linalg_"), args, kwargs)

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
        key = _key_of_call(function, args, kwargs)
        if key is not None and key in self.trace.told:
            return copy.copy(self.trace.told[key])
        calls, seen = len(self.trace.calls), len(self.trace.uses)
        result = self._run_python(function, args, kwargs)
        silent = (calls, seen) == (len(self.trace.calls), len(self.trace.uses))
        parts = result if isinstance(result, list) else [result]
        if key is not None and silent and not any(isinstance(part, list | dict | set) for part in parts):
            self.trace.told[key] = copy.copy(result)  # somebody may add to a list
        return result

    def _run_python(self, function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        self.running.append(function)
        cut = is_cut_off(function)
        self.trace.cut_off += cut
        try:
            return self.run(inspect.unwrap(function), bind(function, args, kwargs))
        finally:
            self.trace.cut_off -= cut
            self.running.pop()


def _key_of_call(function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Return what tells a call from others of a function that is given nothing but numbers and activations.

    None for what is given more, or is no function of a file: what it returns may depend on other things.
    """
    if getattr(function, "__closure__", None) or "." in getattr(function, "__qualname__", "."):
        return None
    values = [_key_of(value) for value in (*args, *kwargs.values())]
    return None if None in values else (function, *values, len(args), *kwargs)


def _key_of(value: Any) -> Any:
    """Return what tells a value from others; None for what holds more than numbers, or may be changed."""
    if value is None or isinstance(value, bool | int | float | str | torch.dtype | torch.device):
        return type(value), value
    if isinstance(value, tuple):
        parts = tuple(map(_key_of, value))
        return None if None in parts else parts
    if not isinstance(value, Flow) or value.tensor is not None or value.behind or value.terms:
        return None
    if value.weighed or value.moved or value.changed or value.place:
        return None
    return tuple(asdict(value, recurse=False).values())


def _is_chain_of_all(function: Any) -> bool:
    """True for `itertools.chain.from_iterable`, which is another object each time."""
    return getattr(function, "__self__", None) is itertools.chain and function.__name__ == "from_iterable"
