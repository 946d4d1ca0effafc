"""Hidden widths: the sizes of the features that pass from one layer of a model to the next."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from torch import nn

from megaopt_core.routing import is_projection
from megaopt_roles.forward.dependencies import ARGUMENT, NUMBER
from megaopt_roles.forward.sources.stored_weights import stored_weight
from megaopt_roles.forward.uses import Use
from megaopt_roles.model.features import inputs_of, made_by, outputs_of, taken_by
from megaopt_roles.model.reading import ModelReading

__all__ = ["Widths"]


class Widths:
    """The hidden widths of a model: what norms normalize and tables return; else what one layer hands to another.

    A width of one is a score, never hidden. Where the model is one layer alone, what it takes is what it returns.

    Args:
        model: the model, unwrapped.
        modules: its modules by canonical name.
        reading: what its sources say.
        heads: the projections that may be heads, by identity.
    """

    def __init__(
        self, model: nn.Module, modules: Mapping[str, nn.Module], reading: ModelReading, heads: set[int]
    ) -> None:
        self._modules, self._reading = modules, reading
        self._by_identity: dict[int, int] = {}
        self._rows: set[int] = set()
        last = _last_norms(modules, reading, reading.ends(model)[0] & reading.scaled)
        self._last: set[int] = set()
        norms, made, taken = set[int](), set[int](), set[int]()
        for module in modules.values():
            if isinstance(module, nn.Embedding | nn.EmbeddingBag):
                self._rows.add(module.num_embeddings)
                norms.add(module.embedding_dim)
            elif is_projection(module) or isinstance(module, nn.Bilinear):
                self._by_identity[id(module)] = outputs_of(module)
                taken.add(inputs_of(module))
                self._rows |= _rows_of_codes(module, reading)
                if id(module) not in heads:
                    made.add(outputs_of(module))
            elif "norm" in type(module).__name__.lower():
                (self._last if id(module) in last else norms).update(_normalized(module))
            for param in module._parameters.values():
                uses = reading.uses.get(id(param), ())
                if param is not None and param.dim() > 1:
                    self._by_hand(param, uses, norms)
                    if param.dim() > 2 and any(use.batch or len(use.outputs) > 1 for use in uses):
                        continue  # a stack
                    if heads.isdisjoint((id(param), id(module))) and id(param) in self._by_identity:
                        made.add(self._by_identity[id(param)])
                    taken |= taken_by(param, reading.uses)
        self._last -= norms
        self._hidden = ((norms | self._last) - {1}) or ((made & taken) - {1})
        self._hidden |= _lone_width(model, reading, heads)

    def _by_hand(self, param: nn.Parameter, uses: Collection[Use], tables: set[int]) -> None:
        """Note the width that a product with a bare weight returns, and the sizes of a bare table."""
        outputs = made_by(param, self._reading.uses)
        if id(param) not in self._by_identity and len(outputs) == 1:
            self._by_identity[id(param)] = outputs.pop()
        if param.dim() == 2 and any(use.kind == "indexed" for use in uses):
            self._rows.add(param.shape[0])
            tables.add(param.shape[1])

    def is_handed_on(self, projection: int) -> bool:
        """True for a projection of whose output some layer takes all features, or one that does not say how many.

        Args:
            projection: its identity.
        """
        width = self._by_identity.get(projection, 0)
        taking = (
            call.module
            for module in self._modules.values()
            for call in self._reading.calls(module)
            if projection in self._reading.origins(call.deps)[0]
        )
        return any(
            not isinstance(taker, nn.Module) or not is_projection(taker) or inputs_of(taker) >= width
            for taker in taking
        )

    def is_of_last_norm(self, projection: int) -> bool:
        """True for a projection as wide as what only norms scale that nothing follows, and no other one: a refinement.

        Args:
            projection: its identity.
        """
        return self._by_identity.get(projection) in self._last

    def is_hidden(self, projection: int, *, residual: bool = False) -> bool:
        """True for a projection that hands a hidden width on; not when it is as wide as a table is long.

        Args:
            projection: its identity.
            residual: it adds to a sum that began with a table, the input, or another layer.
        """
        width = self._by_identity.get(projection)
        return width in self._hidden and (residual or width not in self._rows)


def _rows_of_codes(projection: nn.Module, reading: ModelReading) -> set[int]:
    """Return how many one-hot codes a projection takes: it is a table of as many rows."""
    uses = reading.uses.get(id(stored_weight(projection)), ())
    return {inputs_of(projection)} if any(use.kind == "indexed" for use in uses) else set()


def _last_norms(
    modules: Mapping[str, nn.Module], reading: ModelReading, projections: frozenset[int]
) -> set[int]:
    """Return the norms that scale projections alone which end in what the model returns, with norms in between."""
    return {
        id(call.module)
        for module in modules.values()
        for call in (reading.calls(module) if projections else ())
        if "norm" in type(call.module).__name__.lower() and _comes_only_from(reading, call.deps, projections)
    }


def _comes_only_from(reading: ModelReading, deps: frozenset[Any], projections: frozenset[int]) -> bool:
    found, passes = reading.origins(deps)
    return bool(found) and found <= projections and not passes


def _normalized(norm: nn.Module) -> set[int]:
    """Return the features that a norm scales: the last size of its weight, or of the first gain that it has."""
    gains = [norm._parameters.get("weight"), *norm._parameters.values()]
    for gain in gains:
        if gain is not None and not nn.parameter.is_lazy(gain) and gain.dim():
            return {gain.shape[-1] if gain.shape[-1] > 1 else max(gain.shape)}  # of images: [1, C, 1, 1]
    return set()


def _lone_width(model: nn.Module, reading: ModelReading, heads: set[int]) -> set[int]:
    """Return the width of a model that is one layer: no deeper than its own projections, no narrower inside.

    What returns a loss is no layer.
    """
    own = [_only(child) for child in model._modules.values() if child is not None]
    bare = (param for param in model._parameters.values() if param is not None and param.dim() > 1)
    layers: list[nn.Module | nn.Parameter] = [child for child in own if is_projection(child)]
    layers += [param for param in bare if made_by(param, reading.uses)]
    analysis = reading.analysis(model)
    losses = any(NUMBER in deps for deps in (analysis.returned, *analysis.parts))
    if losses or len(layers) < 2 or any(any(True for _ in child._modules) for child in own):
        return set()
    begun = [call.module for call in analysis.calls if call.deps <= {ARGUMENT}]
    first = (taken_by(layer, reading.uses) for layer in begun if any(layer is part for part in layers))
    width = set[int]().union(*first)
    if len(width) != 1:
        return set()
    sizes = [(taken_by(layer, reading.uses), made_by(layer, reading.uses)) for layer in layers]
    squares = [made for taken, made in sizes if taken == made != width]
    ends = [size for layer, size in zip(layers, sizes, strict=True) if id(layer) in heads]
    returns = all(made == width and max(taken, default=0) >= max(width) for taken, made in ends)
    return width if returns and not squares else set()


def _only(module: nn.Module) -> nn.Module:
    """Return the one child of a sequence that has parameters."""
    parts = [
        part for part in module._modules.values() if part is not None and any(True for _ in part.parameters())
    ]
    return parts[0] if isinstance(module, nn.Sequential) and len(parts) == 1 else module
