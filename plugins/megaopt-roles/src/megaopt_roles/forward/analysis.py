"""What the forward of one module says about its children and parameters."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any

from attrs import define, field
from torch import nn

from megaopt_roles.forward.dependencies import Call, call_behind, is_mark
from megaopt_roles.forward.evaluation.statements import Evaluator
from megaopt_roles.forward.inputs import run_forward
from megaopt_roles.forward.objects.alternatives import Choice
from megaopt_roles.forward.objects.attributes import Bound
from megaopt_roles.forward.rows import are_gates, find_heads, find_split, is_covered
from megaopt_roles.forward.sources.cutting import may_split
from megaopt_roles.forward.sources.module_classes import forward_of, own_methods
from megaopt_roles.forward.sources.trees import function_tree
from megaopt_roles.forward.trace import Trace
from megaopt_roles.forward.uses import Use
from megaopt_roles.forward.values import deps_of, held_by, weights_of
from megaopt_roles.forward.weights.forms import whole_weight

__all__ = ["Analysis", "analyze", "returned_by"]


@define(eq=False)
class Analysis:
    """What the forward of one module says.

    Args:
        calls: calls of children and products with weights, in order.
        returned: what the result depends on.
        parts: the same for each item, where it is a tuple or a dictionary.
        held: the same for each item of whatever may be returned, an object too.
        uses: how parameters are used, by identity.
        splits: sizes along the outputs of projections and weights, by identity of the owner; None where they are
            split in a way that a view cannot describe.
        cuts: the same for axes of weights that are cut before use, by identity and axis.
        heads: rows of a head in each piece, by identity of the owner, where all are known.
        gates: owners of whose pieces several go through a sigmoid or a tanh, by identity.
        compared: what the factors of products of two layers' outputs depend on.
        unit: what is divided by its own length depends on.
        scored: what losses of classes depend on, each by what one layer returned.
        against: what one layer returned, each, that is held against what others did.
        readable: the forward's source was there, and was read to the end.
        reads: plain attributes of modules that this depends on.
    """

    calls: list[Call] = field(factory=list)
    returned: frozenset[Any] = frozenset()
    parts: tuple[frozenset[Any], ...] = ()
    held: tuple[frozenset[Any], ...] = ()
    uses: dict[int, set[Use]] = field(factory=dict)
    splits: dict[int, tuple[int, ...] | None] = field(factory=dict)
    cuts: dict[tuple[int, int], tuple[int, ...] | None] = field(factory=dict)
    heads: dict[int, tuple[int, ...]] = field(factory=dict)
    gates: set[int] = field(factory=set)
    compared: frozenset[Any] = frozenset()
    unit: frozenset[Any] = frozenset()
    scored: frozenset[Any] = frozenset()
    against: frozenset[Any] = frozenset()
    readable: bool = True
    reads: list[tuple[nn.Module, str, Any]] = field(factory=list)


def analyze(module: nn.Module, *, flows_only: bool = False, changes: nn.Parameter | None = None) -> Analysis:
    """Read the forward of a module.

    Args:
        module: the module.
        flows_only: the splits are not asked for.
        changes: the weight that it is given, where it is a parametrization.

    Returns:
        What it says; empty and not `readable` where there is no source.
    """
    result = Analysis()
    forward = forward_of(module)
    ranks = (3,) if flows_only else (3, 2, 4)
    takers: dict[int, nn.Module | int | None] = {}
    doubted: dict[int, tuple[int, ...] | None] = {}
    traces: list[Trace] = []
    for rank in ranks:
        trace = Trace(rank=rank, takers=takers, changes=None if changes is None else whole_weight(changes))
        traces.append(trace)
        complete = _evaluate(module, forward, trace, result if rank == ranks[0] else None)
        _collect(trace, result, doubted)
        result.reads += trace.reads
        if rank == ranks[0]:
            result.calls, result.readable = trace.calls, complete
            result.compared, result.unit = trace.compared, trace.unit
            result.scored, result.against = trace.scored, trace.against
        if not (trace.sources or trace.cuts or trace.uses):  # it calls others: their shapes matter there
            break
        known = doubted.keys() <= result.splits.keys() and all(result.splits.values())
        # What is inlined may cut, too.
        cutting = bool(trace.wrong) or trace.failed or may_split(module, forward)
        if not cutting or (result.splits and known):
            break
    result.splits = {**doubted, **result.splits, **dict.fromkeys(_unclear(traces))}
    result.uses.pop(id(changes), None)  # what a layer does with it says what it is
    return result


def _unclear(traces: Iterable[Trace]) -> set[int]:
    """Return owners whose output a loop goes through in parts, of positions at one rank and of features at another.

    Where a layer takes such a part, it is shaped into heads, or each part got a name, these are features.
    """
    looped, along, sure = set[int](), set[int](), set[int]()
    for trace in traces:
        looped |= trace.looped - trace.wrong
        along |= trace.along - trace.wrong
        sure |= trace.fits - trace.wrong
        sure |= {
            key
            for key, source in trace.sources.items()
            if any(piece.heads > 0 for piece in source.root.children.values())
        }
    named = set[int]().union(*(trace.counted for trace in traces))
    return (looped & along) - sure - named.difference(*(trace.miscounted for trace in traces))


def returned_by(module: nn.Module, method: str) -> Any:
    """Return what a method without arguments returns, by reading it: a module, or several; None for anything else.

    Args:
        module: the module.
        method: its name.
    """
    function = inspect.getattr_static(type(module), method, None)
    if not inspect.isfunction(function):
        return None
    value: Any = None
    with suppress(Exception):  # a source may do anything
        value = Evaluator(Trace()).call(Bound(module, function, method), (), {})
    return list(value.modules) if isinstance(value, Choice) else value


def _evaluate(
    module: nn.Module, forward: Callable[..., Any] | None, trace: Trace, result: Analysis | None
) -> bool:
    """Evaluate a forward, and the other methods where it is missing or leaves children out."""
    evaluator = Evaluator(trace)
    methods = own_methods(module)
    complete = any(
        function_tree(function) is not None for function in (methods if forward is None else [forward])
    )
    returned, parts, held = frozenset[Any](), tuple[frozenset[Any], ...](), tuple[frozenset[Any], ...]()
    try:
        if forward is not None:
            value = run_forward(evaluator, module, forward)
            returned |= deps_of(value)
            if trace.changes is None:
                trace.use_all(weights_of(value), "returned")
            held = held_by(value)
            parts = held if isinstance(value, list | tuple | dict) else ()
    except Exception:  # noqa: BLE001 - a source may do anything; what was seen until then still counts
        complete = False
    passed = {key for key, uses in trace.uses.items() if any(use.kind == "passed" for use in uses)}
    before = len(trace.calls)
    with suppress(Exception):  # the same, in methods that nobody may call
        if not trace.calls or _unused(module, trace):
            for method in methods:
                value = run_forward(evaluator, module, method)
                if forward is None or not any(_came_from(call, returned) for call in trace.calls):
                    returned |= deps_of(value)
    for call in trace.calls[before:] if before else ():
        call.aside = True
    own = {id(param) for param in module._parameters.values()}
    for key in trace.uses.keys() - passed - own:  # by methods that initialize or count
        trace.uses[key] = {use for use in trace.uses[key] if use.kind != "passed"}
    if result is not None:
        result.returned, result.parts, result.held = returned, parts, held
    return complete


def _came_from(call: Call, deps: frozenset[Any]) -> bool:
    return any(not is_mark(dep) and call_behind(dep) is call for dep in deps)


def _unused(module: nn.Module, trace: Trace) -> bool:
    return any(param is not None and id(param) not in trace.uses for param in module._parameters.values())


def _collect(trace: Trace, result: Analysis, doubted: dict[int, tuple[int, ...] | None]) -> None:
    """Add what one evaluation has seen; splits that a layer contradicts count only where no other rank says more."""
    for key, uses in trace.uses.items():
        result.uses.setdefault(key, set()).update(uses)
    found = {key: find_split(source) for key, source in trace.sources.items()}
    _note_splits({key: split for key, split in found.items() if key not in trace.wrong}, result.splits)
    _note_splits({key: split for key, split in found.items() if key in trace.wrong}, doubted)
    _note_splits({key: find_split(source) for key, source in trace.cuts.items()}, result.cuts)
    short: dict[int, list[int]] = {}
    for (key, axis), source in trace.cuts.items():
        if not is_covered(source):  # a size that stands in for another one may have cut it
            short.setdefault(key, []).append(axis)
    for key, axes in short.items():
        cut = tuple(sorted(axes))
        use = Use("cropped", cut) if len(cut) > 1 else Use("shortened" if cut[0] else "sliced", cut)
        result.uses.setdefault(key, set()).add(use)
    for key, source in trace.sources.items():
        split = found[key]
        heads = () if split is None or key in trace.wrong else find_heads(source, split)
        if heads and (key not in result.heads or len(heads) > len(result.heads[key])):
            result.heads[key] = heads
        if are_gates(source):
            result.gates.add(key)


def _note_splits(
    found: Mapping[Any, tuple[int, ...] | None], splits: dict[Any, tuple[int, ...] | None]
) -> None:
    """Add splits to those of other ranks: one that a view describes wins, then one that none does."""
    for key, split in found.items():
        if not splits.get(key) and (split or key not in splits or split is None):
            splits[key] = split
