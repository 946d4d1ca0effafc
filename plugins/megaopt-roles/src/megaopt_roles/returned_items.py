"""What a model returns, item by item, and the projections that each of them comes from."""

from __future__ import annotations

from typing import Any

from attrs import frozen
from torch import nn

from megaopt_core.routing import is_projection
from megaopt_roles.forward.dependencies import ARGUMENT, JOINED, NUMBER, Call, Part, is_mark
from megaopt_roles.model.reading import ModelReading

__all__ = ["Item", "items_of_model"]


@frozen(eq=False)
class Item:
    """What a model returns, or one item of it.

    Args:
        found: identities of the projections that it comes from, with nothing that has parameters in between.
        passes: the model's input comes through.
        joined: they lie side by side in it.
        number: it is a loss, or another number.
    """

    found: frozenset[int]
    passes: bool
    joined: bool
    number: bool = False


def items_of_model(model: nn.Module, reading: ModelReading) -> list[Item]:
    """Return each item that a model returns: of a tuple, of an object that it makes, or of several returns."""
    if is_projection(model):
        return [Item(*reading.ends(model), joined=False)]
    analysis = reading.analysis(model)
    if analysis.parts:
        parts = [(reading.ends(model, i), deps) for i, deps in enumerate(analysis.parts)]
    else:
        made = _alternatives(reading, model, set())
        parts = [(reading.origins(deps), deps) for deps in made] if len(made) > 1 else []
    parts = parts or [(reading.ends(model), analysis.returned)]
    return [Item(*ends, _is_joined(reading, deps), NUMBER in deps) for ends, deps in parts]


def _alternatives(reading: ModelReading, module: nn.Module, seen: set[int]) -> list[frozenset[Any]]:
    """Return what each value depends on that a module may return, or that one may which it calls at last."""
    seen.add(id(module))
    analysis = reading.analysis(module)
    made = [deps for deps in analysis.held if deps]
    last = [dep for dep in analysis.returned if not is_mark(dep)]
    if len(made) > 1 or len(last) != 1 or not (isinstance(last[0], Call) and _is_read(last[0], seen)):
        return made
    (call,) = last
    inside = _alternatives(reading, call.module, seen)
    if len(inside) < 2:
        return made
    beside = analysis.returned - {call}
    # What is given to the module inside is what this one hands it.
    given = [deps - {ARGUMENT} | call.deps if ARGUMENT in deps else deps for deps in inside]
    return [deps | beside for deps in given]


def _is_read(dep: Any, seen: set[int]) -> bool:
    """True for a call of a module, or a part of it, that returns what others made, and was not looked into."""
    if is_mark(dep) or isinstance(dep.module, nn.Parameter):
        return False
    return id(dep.module) not in seen and not is_projection(dep.module)


def _is_joined(reading: ModelReading, deps: frozenset[Any]) -> bool:
    """True where a value was put together of several, side by side, and nothing was added to it since."""
    seen: set[int] = set()
    while JOINED not in deps:
        dep: Any = next(iter(deps - {NUMBER})) if len(deps - {NUMBER}) == 1 else ARGUMENT
        if not _is_read(dep, seen):
            return False
        seen.add(id(dep.module))
        analysis = reading.analysis(dep.module)
        item = dep.index if isinstance(dep, Part) else None
        deps = analysis.returned if item is None or item >= len(analysis.parts) else analysis.parts[item]
    return True
