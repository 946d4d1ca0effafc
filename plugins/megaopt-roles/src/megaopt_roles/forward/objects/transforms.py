"""Functions that call what they are given: checkpoints, `vmap`, `partial`, `reduce`, scans."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from attrs import evolve, field, frozen
from torch import nn

from megaopt_roles.forward.objects.containers import items_of
from megaopt_roles.forward.operations import derivatives
from megaopt_roles.forward.operations.arguments import argument
from megaopt_roles.forward.sources import quiet
from megaopt_roles.forward.trace import Trace
from megaopt_roles.forward.values import Flow, Weight, weights_of
from megaopt_roles.forward.weights.parts import taken

__all__ = ["TRANSFORMS", "Prepared"]

type _Call = Callable[[Any, Sequence[Any], dict[str, Any]], Any]


@frozen(eq=False)
class Prepared:
    """A function that gets other arguments than its caller gives, or whose caller gets something else.

    Of `functools.partial`, of `torch.vmap`, of `torch.func.grad`.

    Args:
        function: what is called.
        args: positional arguments that it gets before the caller's.
        kwargs: keyword arguments that it gets beside the caller's.
        in_dims: the axis of each argument that is mapped over; None for an argument that is passed as it is.
        finish: returns what the caller gets, of the result and the caller's arguments; None where that is the result.
    """

    function: Any
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(factory=dict)
    in_dims: Any = None
    finish: Callable[[Any, Sequence[Any]], Any] | None = None

    def arguments(self, args: Sequence[Any]) -> list[Any]:
        """Return the positional arguments of one call: one entry of each weight that is mapped over."""
        spread = isinstance(self.in_dims, list | tuple)
        dims = self.in_dims if spread else [self.in_dims] * len(args)
        return [*self.args, *(_entry(arg, dim) for arg, dim in zip(args, dims, strict=False))]


def _entry(value: Any, dim: Any) -> Any:
    if isinstance(value, dict):
        return {
            key: _entry(item, dim.get(key) if isinstance(dim, dict) else dim) for key, item in value.items()
        }
    if isinstance(value, Weight) and isinstance(dim, int) and value.shape and value.axes:
        return taken(value, dim % len(value.shape), None)
    return value


def _checkpoint(call: _Call, trace: Trace, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    return call(args[0], args[1:], {})


def _checkpoint_sequential(call: _Call, trace: Trace, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    value = argument(2, "input", args, kwargs)
    layers = quiet.items(args[0])
    if layers is None:
        return trace.unknown(value)
    for layer in layers:
        value = call(layer, [value], {})
    return value


def _reduce(call: _Call, trace: Trace, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    first, *rest = [*args[2:3], *(items_of(trace, args[1]) if len(args) > 1 else ())] or [Flow()]
    for item in rest:
        first = call(args[0], [first, item], {})
    return first


def _scan(call: _Call, trace: Trace, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Return what a scan makes of its entries: what its function makes of two of them."""
    entries = argument(1, "xs", args, kwargs)
    return call(args[0], [entries, entries], {})


def _vmap(call: _Call, trace: Trace, args: Sequence[Any], kwargs: dict[str, Any]) -> Prepared:
    dims = argument(1, "in_dims", args, kwargs)
    return Prepared(args[0], in_dims=0 if dims is None else dims)


def _grad(call: _Call, trace: Trace, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Return `torch.func.grad(function)` and the like; of tensors, `torch.autograd.grad`."""
    if isinstance(args[0], Flow | Weight | list | tuple):
        return derivatives.grad(trace, args, kwargs)
    which, aside = argument(1, "argnums", args, kwargs) or 0, kwargs.get("has_aux") is True

    def finish(made: Any, given: Sequence[Any]) -> Any:
        value, more = made if aside and isinstance(made, list | tuple) and len(made) == 2 else (made, None)
        several = [given[at] for at in which] if isinstance(which, list | tuple) else given[which]
        found = derivatives.gradient(trace, value, several)
        return [found, more] if aside else found

    return Prepared(args[0], finish=finish)


def _grad_and_value(call: _Call, trace: Trace, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Return `torch.func.grad_and_value(function)`."""
    prepared = _grad(call, trace, args, {**kwargs, "has_aux": False})
    aside, finish = kwargs.get("has_aux") is True, prepared.finish

    def both(made: Any, given: Sequence[Any]) -> Any:
        value = made[0] if aside and isinstance(made, list | tuple) and made else made
        return [finish(value, given), made]

    return evolve(prepared, finish=both)


def _partial(call: _Call, trace: Trace, args: Sequence[Any], kwargs: dict[str, Any]) -> Prepared:
    return Prepared(args[0], tuple(args[1:]), kwargs)


def _sequential(call: _Call, trace: Trace, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Return `nn.Sequential(*layers)` of layers that the model holds: to hold them once more changes none."""
    if all(isinstance(layer, nn.Module) for layer in args):
        return nn.Sequential(*args)
    return trace.passed(weights_of(args), args)


def _cast(call: _Call, trace: Trace, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Return what `typing.cast` returns: the value as it is."""
    return args[1] if len(args) > 1 else kwargs.get("val")


TRANSFORMS = {
    ("torch", "checkpoint"): _checkpoint,
    ("torch", "checkpoint_sequential"): _checkpoint_sequential,
    ("torch", "associative_scan"): _scan,
    ("torch", "vmap"): _vmap,
    **dict.fromkeys([("torch", name) for name in ("grad", "jacrev", "jacfwd")], _grad),
    ("torch", "grad_and_value"): _grad_and_value,
    ("torch", "Sequential"): _sequential,
    ("_functools", "reduce"): _reduce,
    ("functools", "partial"): _partial,
    ("typing", "cast"): _cast,
}
"""By the library that they are from, and their name."""
