"""Residual streams: what shows that the last projection of a model adds to one, and is no head."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from megaopt_core.routing import is_projection
from megaopt_roles.features import inputs_of, outputs_of, widths_taken
from megaopt_roles.forward.values import ARGUMENT
from megaopt_roles.reading import Ends, ModelReading

__all__ = ["Stream"]


class Stream:
    """What a model returns, item by item, and which of its last projections add to something as wide.

    A stack of matrices returns to it where its output is as wide as what the model takes. Any other projection adds to
    a stream where the same item also comes, with nothing in between, from a table as wide as
    its output, from a projection as wide whose output other layers take, or from an input as wide.

    Args:
        model: the model, unwrapped.
        modules: its modules by canonical name.
        reading: what its sources say.
    """

    def __init__(self, model: nn.Module, modules: Mapping[str, nn.Module], reading: ModelReading) -> None:
        self._reading = reading
        self._widths: dict[int, int] = {}
        self._tables: set[int] = set()
        for module in modules.values():
            if isinstance(module, nn.Embedding | nn.EmbeddingBag):
                self._widths[id(module)] = module.embedding_dim
                self._tables.add(id(module))
            elif is_projection(module):
                self._widths[id(module)] = outputs_of(module)
            for param in module._parameters.values():
                if param is not None and param.dim() > 1:
                    self._by_hand(param)
        self._items = _items(model, reading)
        first = [call.module for call in reading.analysis(model).calls if call.deps <= {ARGUMENT}]
        self._inputs = {
            inputs_of(part) for part in first if isinstance(part, nn.Module) and is_projection(part)
        }
        for part in first:
            if isinstance(part, nn.Parameter):
                self._inputs |= widths_taken(part, reading.uses.get(id(part), ()))
        self._stacks = {
            id(param)
            for module in modules.values()
            for param in module._parameters.values()
            if param is not None and param.dim() > 2 and not is_projection(module)
        }

    def _by_hand(self, param: nn.Parameter) -> None:
        uses = self._reading.uses.get(id(param), ())
        outputs = {param.shape[use.outputs[0]] for use in uses if len(use.outputs) == 1}
        if len(outputs) == 1:
            self._widths.setdefault(id(param), outputs.pop())
        if param.dim() == 2 and any(use.kind == "indexed" for use in uses):
            self._widths[id(param)] = param.shape[1]
            self._tables.add(id(param))

    @property
    def alone(self) -> set[int]:
        """The projections whose output an item of what the model returns is, with nothing added to it."""
        return {
            projection
            for found, passes in self._items
            if len(found) == 1 and not passes
            for projection in found
        }

    def takes(self, projection: int) -> bool:
        """True for a projection whose output is added to a stream in everything that the model returns of it.

        Args:
            projection: its identity, or that of a weight used by hand.
        """
        width = self._widths.get(projection)
        holding = [item for item in self._items if projection in item[0]]
        return bool(holding) and all(
            (width in self._inputs and (passes or projection in self._stacks))
            or any(self._begins(other, width) for other in found - {projection})
            for found, passes in holding
        )

    def _begins(self, other: int, width: int | None) -> bool:
        return self._widths.get(other) == width and (other in self._tables or other in self._reading.consumed)


def _items(model: nn.Module, reading: ModelReading) -> list[Ends]:
    """Return what each item comes from that a model returns: of a tuple, or of an object that it makes."""
    if is_projection(model):
        return [reading.ends(model)]
    analysis = reading.analysis(model)
    if analysis.parts:
        return [reading.ends(model, i) for i in range(len(analysis.parts))]
    made = [deps for deps in analysis.held if deps]
    return [reading.origins(deps) for deps in made] if len(made) > 1 else [reading.ends(model)]
