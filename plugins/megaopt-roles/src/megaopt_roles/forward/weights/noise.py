"""Noise, and the weights that scale it: layers of Bayes, and those that explore."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Iterable, Sequence
from math import prod
from typing import Any, Final

from attrs import evolve
from torch import nn

from megaopt_roles.forward.comparisons import as_number
from megaopt_roles.forward.dependencies import is_mark
from megaopt_roles.forward.sources.module_classes import home_of, own_methods
from megaopt_roles.forward.sources.trees import function_tree
from megaopt_roles.forward.trace import Trace
from megaopt_roles.forward.uses import Use
from megaopt_roles.forward.values import Flow, Weight, deps_of, flows_of, weights_of

__all__ = ["DENSITIES", "density", "distribution", "drawn", "is_drawn", "is_refilled", "likelihood", "spread"]

_CREATED: Final = frozenset(["rand", "randn", "rand_like", "randn_like", "normal", "sample", "rsample"])
_FILLED: Final = frozenset(["normal_", "uniform_", "log_normal_", "cauchy_", "exponential_"])
DENSITIES: Final = frozenset(["log_prob", "kl_divergence", "entropy", "cdf"])
"""What is asked of a distribution that makes no value of it."""
_LOCATED: Final = frozenset(["Normal", "Laplace", "Cauchy", "Gumbel", "LogNormal"])
"""Distributions of a location and a scale."""

_refilled: dict[type, frozenset[str]] = {}


def is_drawn(name: str, args: Sequence[Any]) -> bool:
    """True for a function, or a method, that returns noise: of more than one number, which would scale a weight.

    Args:
        name: of the function.
        args: positional arguments.
    """
    of_weight = name in ("sample", "rsample") and weights_of(args[:1])
    if name not in _CREATED | _FILLED or deps_of(args) or of_weight:
        return False
    sizes = args[0] if len(args) == 1 and isinstance(args[0], list | tuple) else args
    one = bool(sizes) and all(type(size) is int for size in sizes) and prod(sizes) == 1
    return not (one and name in ("rand", "randn"))


def drawn(result: Any, parts: Iterable[Any]) -> Any:
    """Return a value, as noise where it was made of noise and of nothing that a layer made.

    Args:
        result: the value.
        parts: what it was made of.
    """
    made = isinstance(result, Flow) and not result.deps and not result.noise
    return evolve(result, noise=True) if made and any(flow.noise for flow in flows_of([*parts])) else result


def is_refilled(module: nn.Module, name: str) -> bool:
    """True for a tensor of a module whose methods draw noise and write what they make into it, or that was made of it.

    Args:
        module: the module.
        name: of the buffer, or of the plain attribute.
    """
    kind = type(module)
    if kind not in _refilled:
        trees = [tree for tree in map(function_tree, _methods(module)) if tree is not None]
        nodes = [node for tree in trees for node in ast.walk(tree)]
        written = {found for node in nodes for found in (*_written(node), *_written_in_turn(node))}
        _refilled[kind] = frozenset(written if _draws(nodes) else ()) | _drawn_at_first(kind)
    return name in _refilled[kind]


def _draws(nodes: Iterable[ast.AST]) -> bool:
    """True where a function or a method that returns noise is named."""
    names = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    names |= {node.id for node in nodes if isinstance(node, ast.Name)}
    return bool(names & (_CREATED | _FILLED))


def _drawn_at_first(kind: type) -> frozenset[str]:
    """Return the tensors that constructors fill with noise, once: buffers, one by one or in a loop, and attributes.

    What noise is compared with something for is a mask.
    """
    made = [vars(base).get("__init__") for base in kind.__mro__ if not home_of(base).startswith("torch.")]
    trees = [tree for tree in map(function_tree, filter(inspect.isfunction, made)) if tree is not None]
    found = set[str]()
    for node in (node for tree in trees for node in ast.walk(tree)):
        looped = _written_in_turn(node)
        for part in ast.walk(node) if looped else (node,):
            value = part.value if isinstance(part, ast.Assign) else _registered(part)
            inside = [*ast.walk(value)] if value is not None else []
            if _draws(inside) and not any(isinstance(inner, ast.Compare) for inner in inside):
                found.update(looped or _written(part))
    return frozenset(found)


def _methods(module: nn.Module) -> list[Callable[..., Any]]:
    forward = getattr(type(module), "forward", None)
    return [*own_methods(module), *([forward] if inspect.isfunction(forward) else [])]


def _registered(node: ast.AST) -> ast.expr | None:
    """Return what a call registers as a buffer; None for any other call."""
    match node:
        case ast.Call(func=ast.Attribute(attr="register_buffer"), args=[_, value, *_]):
            return value
    return None


def _written(node: ast.AST) -> list[str]:
    """Return the attributes of `self` that a statement or a call writes, or the buffer that it registers."""
    match node:
        case ast.Call(
            func=ast.Attribute(attr="register_buffer"), args=[ast.Constant(value=str() as name), *_]
        ):
            return [name]
    return [
        target.attr
        for target in _targets(node)
        if isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name)
    ]


def _written_in_turn(node: ast.AST) -> list[str]:
    """Return the attributes of `self`, or their names, that a loop goes through and writes, one after the other."""
    if not (isinstance(node, ast.For) and isinstance(node.iter, ast.Tuple | ast.List)):
        return []
    loops = {part.id for part in ast.walk(node.target) if isinstance(part, ast.Name)}
    written = {
        part.id
        for inner in ast.walk(node)
        for target in (
            *_targets(inner),
            *(inner.args[:1] if isinstance(inner, ast.Call) and _registered(inner) else ()),
        )
        for part in ast.walk(target)
        if isinstance(part, ast.Name) and not isinstance(inner, ast.Assign)
    }
    each = [part for item in node.iter.elts for part in ast.walk(item)] if loops & written else []
    named = [part.value for part in each if isinstance(part, ast.Constant) and isinstance(part.value, str)]
    return [*named, *(part.attr for part in each if isinstance(part, ast.Attribute))]


def _targets(node: ast.AST) -> list[ast.expr]:
    """Return what a statement or a call writes, or the tensors whose data it writes."""
    targets: list[ast.expr] = []
    if isinstance(node, ast.Assign):
        targets = [part for target in node.targets for part in getattr(target, "elts", (target,))]
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr.endswith("_"):
        targets = [node.func.value]
    return [
        target.value if isinstance(target, ast.Attribute) and target.attr == "data" else target
        for target in targets
    ]


def distribution(trace: Trace, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Return what stands for a distribution that is made of weights: its location, where it has one.

    Args:
        trace: where uses are noted.
        name: of its class.
        args: positional arguments.
        kwargs: keyword arguments.

    Returns:
        A value that what is drawn from it depends on, as the weight that noise is added to.
    """
    values = [*args, *kwargs.values()]
    if name == "Independent" and values and isinstance(values[0], Weight):
        return values[0]
    location = args[0] if args else kwargs.get("loc")
    scale = args[1] if len(args) > 1 else kwargs.get("scale")
    if name in _LOCATED and isinstance(location, Weight) and not deps_of(values):
        trace.use_all(weights_of(scale), "noise")
        return location
    trace.use_all(weights_of(values), "elementwise")
    return trace.unknown(args, kwargs)


def density(trace: Trace, args: Sequence[Any], kwargs: dict[str, Any]) -> Flow:
    """Return how likely something is: a number that weights alone make is a penalty, and says nothing of them."""
    made = trace.unknown(args, kwargs)
    trace.use_all(weights_of((args, kwargs)), "elementwise" if made.deps else "penalized")
    return as_number(made)


def likelihood(trace: Trace, args: Sequence[Any], kwargs: dict[str, Any]) -> Flow:
    """Return how likely something is in a distribution: what layers made of it is held against that."""
    trace.against |= frozenset(dep for dep in deps_of(args[:1]) if not is_mark(dep))
    return density(trace, args, kwargs)


def spread(trace: Trace, mean: Weight, scale: Weight) -> Weight | None:
    """Return what a weight becomes to which noise is added that another one scales; None for any other sum.

    Args:
        trace: where uses are noted.
        mean: the weight.
        scale: what may scale noise.
    """
    noisy = all(id(param) in trace.noisy for param in scale.params)
    if not noisy or any(id(param) in trace.noisy or not param.requires_grad for param in mean.params):
        return None
    trace.use(scale, Use("noise"))
    return evolve(mean, deps=mean.deps | scale.deps)
