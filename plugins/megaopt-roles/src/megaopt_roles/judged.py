"""Networks whose output another network of the model judges: policies before critics, generators before a judge."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from attrs import evolve, frozen
from torch import nn

from megaopt_core.params import RoleDecision
from megaopt_core.routing import doubted, is_projection, output
from megaopt_roles.forward.dependencies import ARGUMENT, JOINED, Call, is_mark
from megaopt_roles.model.features import made_by, taken_by
from megaopt_roles.model.reading import ModelReading

__all__ = ["find_judged"]

_DEEPEST = 4
"""How many modules deep the layers are looked for that take what a model is given."""


@frozen(eq=False)
class _Taken:
    """What a layer takes, somewhere where what the model is given can be told from what it makes.

    Args:
        layer: the layer, or a weight that is used by hand.
        made: the projections whose output it takes.
        given: it takes what the model is given, too.
        joined: these lie side by side.
        call: the call that hands it over.
        once: the layer takes nothing else there.
    """

    layer: nn.Module | nn.Parameter
    made: frozenset[int]
    given: bool
    joined: bool
    call: Call
    once: bool = False


def find_judged(
    model: nn.Module, modules: Mapping[str, nn.Module], reading: ModelReading
) -> dict[int, RoleDecision]:
    """Return the decisions for the last projections of networks whose output is judged, by identity.

    Their output stands where the model may be given something: a layer takes it that takes what is given in another
    call. Or it lies beside what its own network was given, as an action beside a state. What a network makes of its
    own output is a recurrence, and no such thing. A copy, which moves behind, is what it is a copy of.

    Args:
        model: the model, unwrapped.
        modules: its modules by canonical name.
        reading: what its sources say.
    """
    by_identity = _layers(modules, reading)
    taken = [part for scope in _scopes(model, reading) for part in _taken(scope, reading)]
    given = {id(part.layer) for part in taken if part.given and not part.made}
    found: dict[int, RoleDecision] = {}
    alike: set[tuple[object, ...]] = set()
    told = [part for part in taken if id(part.layer) in given or (part.given and part.joined)]
    pairs = [*_pairs(told, by_identity, reading)]
    begun: dict[int, set[int]] = {}
    passed_on = _passed_on(by_identity.values(), given & {id(part.layer) for _, part in pairs}, reading)
    for maker, part in pairs:
        if id(part.layer) in given:
            head = output("a layer takes its output in place of what the model is given")
            hidden = bool(made_by(maker, reading.uses) & passed_on)
            found[id(maker)] = doubted(head, "it may be a hidden width") if hidden else head
            alike.add(_signature(maker, part, reading))
        elif _may_lie_beside(maker, part, reading, passed_on):
            if id(part.call) not in begun:
                begun[id(part.call)] = _widths_of_inputs(part.call, reading)
            made = made_by(maker, reading.uses) | _halves(maker, reading)
            beside = {width - own for width in taken_by(part.layer, reading.uses) for own in made}
            if not beside & begun[id(part.call)]:
                continue
            head = doubted(output("it lies beside what its network was given, as an action beside a state"))
            found.setdefault(id(maker), head)
    copies = {
        id(maker): doubted(output("another one like it stands in place of what the model is given"))
        for maker, part in (_pairs(taken, by_identity, reading) if alike else ())
        if _signature(maker, part, reading) in alike
    }
    return {**copies, **found}


def _layers(modules: Mapping[str, nn.Module], reading: ModelReading) -> dict[int, nn.Module | nn.Parameter]:
    """Return the projections of a model, and the matrices that it uses by hand, by identity."""
    found: dict[int, nn.Module | nn.Parameter] = {}
    for module in modules.values():
        if is_projection(module):
            found[id(module)] = module
            continue
        own = (param for param in module._parameters.values() if param is not None and param.dim() > 1)
        found.update({id(param): param for param in own if len(made_by(param, reading.uses)) == 1})
    return found


def _pairs(
    taken: Collection[_Taken], layers: Mapping[int, nn.Module | nn.Parameter], reading: ModelReading
) -> Iterator[tuple[nn.Module | nn.Parameter, _Taken]]:
    """Yield each projection with what takes its output, but for recurrences."""
    for part in taken:
        makers = part.made & layers.keys()
        if makers and (part.once or not _feeds(part.layer, part.call, reading)):
            yield from ((layers[key], part) for key in makers)


def _scopes(model: nn.Module, reading: ModelReading) -> Iterator[nn.Module]:
    """Yield the modules in which arguments are what the model is given: itself, and those that it hands them to."""
    stack, seen = [(model, 0)], set[int]()
    while stack:
        scope, depth = stack.pop()
        if id(scope) in seen or is_projection(scope):
            continue
        seen.add(id(scope))
        yield scope
        calls = reading.analysis(scope).calls if depth < _DEEPEST else []
        handed = [call.module for call in calls if reading.origins(call.deps) == (frozenset(), True)]
        stack.extend((part, depth + 1) for part in handed if isinstance(part, nn.Module))


def _taken(scope: nn.Module, reading: ModelReading) -> list[_Taken]:
    found = []
    for call in (call for call in reading.analysis(scope).calls if not (call.aside or call.blank)):
        made, given = reading.origins(call.deps)
        for layer, joined in _first(call.module, reading, set()) if made or given else ():
            found.append(_Taken(layer, made, given, joined or JOINED in call.deps, call))
    times = Counter(id(part.layer) for part in found)
    return [evolve(part, once=times[id(part.layer)] == 1) for part in found]


def _first(
    module: nn.Module | nn.Parameter, reading: ModelReading, seen: set[int]
) -> Iterator[tuple[nn.Module | nn.Parameter, bool]]:
    """Yield the projections of a module that take its arguments, and whether something lies side by side there.

    A weight that a product contracts is one, too.
    """
    if id(module) in seen:
        return
    seen.add(id(module))
    if isinstance(module, nn.Parameter):
        if taken_by(module, reading.uses):
            yield module, False
        return
    if is_projection(module):
        yield module, False
        return
    for call in reading.analysis(module).calls if len(seen) <= _DEEPEST else ():
        made, given = reading.origins(call.deps)
        if given and not made:
            for layer, joined in _first(call.module, reading, seen):
                yield layer, joined or JOINED in call.deps


def _passed_on(
    layers: Collection[nn.Module | nn.Parameter], judges: Collection[int], reading: ModelReading
) -> set[int]:
    """Return the widths that one projection makes and another takes, which judges nothing."""
    taken = set[int]().union(*(taken_by(layer, reading.uses) for layer in layers if id(layer) not in judges))
    return taken & set[int]().union(*(made_by(layer, reading.uses) for layer in layers))


def _may_lie_beside(
    maker: nn.Module | nn.Parameter, part: _Taken, reading: ModelReading, passed_on: Collection[int]
) -> bool:
    """True for a projection that narrows, and may lie beside what its network took where a layer takes its output."""
    (width,) = made_by(maker, reading.uses)
    hidden = width in passed_on or id(maker) in reading.used_as("rectified")
    narrows = all(width < taken for taken in taken_by(maker, reading.uses))
    return part.given and part.joined and narrows and not hidden


def _halves(maker: nn.Module | nn.Parameter, reading: ModelReading) -> set[int]:
    """Return the width of the halves that are taken apart: mean and spread of an action, which one layer makes."""
    first, *others = reading.splits.get(id(maker)) or (0,)
    return {first} if others == [first] else set()


def _widths_of_inputs(call: Call, reading: ModelReading) -> set[int]:
    """Return how many features of what the model is given were taken by what made what a call takes."""
    return {
        width
        for dep in _behind(call)
        if ARGUMENT in dep.deps
        for layer, _ in _first(dep.module, reading, set())
        for width in taken_by(layer, reading.uses)
    }


def _feeds(layer: nn.Module | nn.Parameter, call: Call, reading: ModelReading) -> bool:
    """True where a layer is among those that made what it takes."""
    return any(
        any(layer is first for first, _ in _first(dep.module, reading, set())) for dep in _behind(call)
    )


def _behind(call: Call) -> Iterator[Any]:
    """Yield the calls that made what a call takes, and those that made what these take."""
    stack, seen = list(call.deps), set[Any]()
    while stack:
        dep = stack.pop()
        if is_mark(dep) or dep in seen:
            continue
        seen.add(dep)
        yield dep
        stack.extend(dep.deps)


def _signature(maker: nn.Module | nn.Parameter, part: _Taken, reading: ModelReading) -> tuple[object, ...]:
    sizes = (
        frozenset(of(layer, reading.uses)) for layer in (maker, part.layer) for of in (taken_by, made_by)
    )
    return *sizes, part.given
