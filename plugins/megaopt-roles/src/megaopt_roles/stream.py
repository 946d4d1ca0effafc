"""Residual streams: what shows that the last projection of a model adds to one, and is no head."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import cached_property
from typing import Any

from torch import nn

from megaopt_core.routing import is_projection
from megaopt_roles.forward.dependencies import ARGUMENT, Call, call_behind, is_mark
from megaopt_roles.model.features import inputs_of, made_by, outputs_of, taken_by
from megaopt_roles.model.reading import ModelReading
from megaopt_roles.returned_items import Item, items_of_model

__all__ = ["Stream"]


class Stream:
    """What a model returns, item by item, and which of its last projections add to something as wide.

    A projection adds to a stream where the same item also comes, with nothing in between, from a table or a projection
    as wide as its output whose output other layers take, or from an input as wide, and where the last thing that was
    done to it was to add, not to lay side by side.

    Args:
        model: the model, unwrapped.
        modules: its modules by canonical name.
        reading: what its sources say.
    """

    def __init__(self, model: nn.Module, modules: Mapping[str, nn.Module], reading: ModelReading) -> None:
        self._reading, self._modules = reading, modules
        self._widths: dict[int, int] = {}
        for module in modules.values():
            if isinstance(module, nn.Embedding | nn.EmbeddingBag):
                self._widths[id(module)] = module.embedding_dim
            elif is_projection(module):
                self._widths[id(module)] = outputs_of(module)
            for param in module._parameters.values():
                if param is not None and param.dim() > 1:
                    self._by_hand(param)
        self._items = items_of_model(model, reading)
        first = [call.module for call in reading.analysis(model).calls if call.deps <= {ARGUMENT}]
        coded = reading.used_as("indexed")  # one-hot codes are no stream
        self._inputs = {
            inputs_of(part)
            for part in first
            if isinstance(part, nn.Module) and is_projection(part) and id(part) not in coded
        }
        for part in first:
            if isinstance(part, nn.Parameter):
                self._inputs |= taken_by(part, reading.uses)

    def _by_hand(self, param: nn.Parameter) -> None:
        uses = self._reading.uses.get(id(param), ())
        outputs = made_by(param, self._reading.uses)
        if len(outputs) == 1:
            self._widths.setdefault(id(param), outputs.pop())
        if param.dim() == 2 and any(use.kind == "indexed" for use in uses):
            self._widths[id(param)] = param.shape[1]

    @property
    def alone(self) -> set[int]:
        """The projections whose output an item of what the model returns is, with nothing added to it."""
        return {
            projection
            for item in self._items
            if item.joined or (len(item.found) == 1 and not item.passes)
            for projection in item.found
        }

    @cached_property
    def in_losses(self) -> set[int]:
        """The projections whose output nothing but losses, or other numbers, is made of, as far as it is returned."""
        numbers = set[int]().union(*(item.found for item in self._items if item.number))
        return numbers.difference(*(item.found for item in self._items if not item.number))

    @property
    def joined(self) -> set[int]:
        """The projections whose output lies beside that of others in an item of what the model returns."""
        several = (item.found for item in self._items if item.joined and len(item.found) > 1)
        return set[int]().union(*several)

    def adds_to(self, projection: int, heads: Collection[int]) -> bool:
        """True for a projection whose output is, in everything that the model returns of it, added to that of a head.

        Args:
            projection: its identity, or that of a weight used by hand.
            heads: identities of the heads.
        """
        width = self._widths.get(projection)
        holding = [item for item in self._items if projection in item.found]
        alike = {head for head in heads if width is not None and self._widths.get(head) == width}
        return bool(holding) and all(not item.joined and item.found & alike for item in holding)

    def weighs(self, projection: int) -> bool:
        """True for a projection that weighs what else goes into all that the model returns of it.

        Args:
            projection: its identity, or that of a weight used by hand.
        """
        holding = [item for item in self._items if projection in item.found]
        weighing = self._reading.weighing
        return projection in weighing and bool(holding) and all(item.found - weighing for item in holding)

    def makes_alone(self, projection: int, group: Collection[int]) -> bool:
        """True for a projection of a group where nothing else goes into what the model returns of it.

        Args:
            projection: its identity, or that of a weight used by hand.
            group: the same of several.
        """
        holding = [item for item in self._items if projection in item.found]
        return bool(holding) and all(item.found <= set(group) and not item.passes for item in holding)

    def takes(self, projection: int) -> bool:
        """True for a projection whose output is added to a stream in everything that the model returns of it.

        Args:
            projection: its identity, or that of a weight used by hand.
        """
        if self._reading.splits.get(projection) or projection in self._reading.against:
            return False  # no sum takes all of its output
        width = self._widths.get(projection)
        holding = [item for item in self._items if projection in item.found]
        return bool(holding) and all(
            not item.joined
            and ((width in self._inputs and item.passes) or self._begun(item, projection, width))
            for item in holding
        )

    def made_beside(self, projection: int) -> set[int]:
        """Return the projections that other calls end in, one behind the other, that began with the same input.

        Args:
            projection: its identity.
        """
        found = set[int]()
        for module in self._modules.values():
            calls = self._reading.calls(module)
            inputs = [call.deps for call in calls if id(call.module) == projection]
            for call in calls if inputs else ():
                if id(call.module) != projection and any(_began_with(call, deps) for deps in inputs):
                    found |= self._reading.ends(call.module)[0]
        return found

    @cached_property
    def refining(self) -> set[int]:
        """The projections that make an output from a wider stream, and those that alone add to one.

        What a network behind it refines, as that of a synthesizer of speech does, may be an output as well as a stream.
        """
        taken = self._reading.consumed - self._reading.scaled
        tables = self._reading.used_as("indexed")  # what is looked up refines nothing
        tables |= {
            id(part) for part in self._modules.values() if isinstance(part, nn.Embedding | nn.EmbeddingBag)
        }
        found = set[int]()
        for item in self._items:
            for projection in item.found - taken - tables if not item.number else ():
                width = self._widths.get(projection)
                begun = self._by_width[item].get(width, set()) & taken
                others = begun - self._beside.get(projection, set())
                if len(others) == 1 and not item.joined and not item.passes and others <= self._narrowing:
                    found |= {projection, *others}
        return found

    @cached_property
    def _narrowing(self) -> set[int]:
        """The projections that take more features than they return, of what other layers made."""
        return {
            id(call.module)
            for module in self._modules.values()
            for call in self._reading.calls(module)
            if isinstance(call.module, nn.Module)
            and is_projection(call.module)
            and inputs_of(call.module) > outputs_of(call.module)
            and self._reading.origins(call.deps)[0]
        }

    def begins(self, projection: int) -> set[int]:
        """Return the projections whose output a projection is added to, in one thing or another that is returned.

        Args:
            projection: its identity.
        """
        width = self._widths.get(projection)
        holding = [item for item in self._items if projection in item.found]
        others = set[int]().union(*(self._by_width[item].get(width, set()) for item in holding))
        return others - self._beside.get(projection, set()) - {projection}

    def _begun(self, item: Item, projection: int, width: int | None) -> bool:
        """True where another one in an item hands on as wide an output, of another input: it began the stream."""
        others = self._by_width[item].get(width, set()) - {projection}
        return bool(others - self._beside.get(projection, set())) if others else False

    @cached_property
    def _by_width(self) -> dict[Item, dict[int | None, set[int]]]:
        """The projections of each item whose output other layers take, by its width; all of it, not parts."""
        found: dict[Item, dict[int | None, set[int]]] = {item: {} for item in self._items}
        cut = {key for key, split in self._reading.splits.items() if split}
        for item, widths in found.items():
            for projection in (item.found & self._reading.surely_consumed) - cut:
                widths.setdefault(self._widths.get(projection), set()).add(projection)
        return found

    @cached_property
    def _beside(self) -> dict[int, set[int]]:
        """For each projection those that take the same input: they add to each other, and to no stream."""
        found: dict[int, set[int]] = {}
        for module in self._modules.values():
            alike: dict[frozenset[Any], set[int]] = {}
            for call in self._reading.calls(module):
                if id(call.module) in self._widths:
                    alike.setdefault(call.deps, set()).add(id(call.module))
            for several in alike.values():
                for projection in several if len(several) > 1 else ():
                    found.setdefault(projection, set()).update(several)
        return found


def _began_with(call: Call, deps: frozenset[Any]) -> bool:
    """True for a call that takes what depends on these alone, or whose only input such a call made."""
    seen: set[int] = set()
    while call.deps != deps:
        dep: Any = next(iter(call.deps)) if len(call.deps) == 1 else ARGUMENT
        if is_mark(dep) or id(dep) in seen:
            return False
        seen.add(id(dep))
        call = call_behind(dep)
    return True
