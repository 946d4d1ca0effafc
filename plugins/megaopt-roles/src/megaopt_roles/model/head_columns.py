"""Output projections of attention: their inputs are the outputs of heads, a block of columns each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import permutations
from typing import TYPE_CHECKING, Any

from torch import nn

from megaopt_core.routing import is_conv1d, is_linear
from megaopt_roles.forward.dependencies import ARGUMENT
from megaopt_roles.model.features import inputs_of, outputs_of

if TYPE_CHECKING:
    from megaopt_roles.model.reading import ModelReading

__all__ = ["find_head_columns"]


def find_head_columns(reading: ModelReading, modules: Mapping[str, nn.Module]) -> dict[int, int]:
    """Return the columns of a head in the projections that take what attention makes of queries, keys and values.

    Args:
        reading: what the sources of a model say.
        modules: its modules by canonical name.

    Returns:
        By identity of the projection; nothing where heads are of several sizes, or where not all are known.
    """
    by_identity = {id(module): module for module in modules.values()}
    found: dict[int, int] = {}
    for module in modules.values():
        if isinstance(module, nn.MultiheadAttention):
            found[id(module.out_proj)] = module.head_dim
        for call in reading.calls(module):
            taker = call.module
            if id(taker) in reading.heads or not isinstance(taker, nn.Module):
                continue
            if not (is_linear(taker) or is_conv1d(taker)):
                continue
            size = _head_size(reading, by_identity, call.deps, inputs_of(taker))
            if size:
                found[id(taker)] = size
    return found


def _head_size(
    reading: ModelReading, modules: Mapping[int, nn.Module], deps: frozenset[Any], width: int
) -> int:
    """Return the size of a head where values come from queries, keys and values of heads alike, as wide; else 0.

    A table beside them tells attention how far positions are apart.
    """
    sources = [
        source
        for source in reading.origins(deps - {ARGUMENT})[0]
        if not isinstance(modules.get(source), nn.Embedding)
    ]
    heads = [reading.heads.get(source, ()) for source in sources]
    parts = [size for sizes in heads for size in sizes]
    if len(parts) != 3 or not all(heads) or len(set(parts)) != 1 or width % parts[0]:
        return _latent_head_size(
            reading, modules, [source for source in sources if source in reading.heads], width
        )
    rows = {size for source in sources for size in _part_rows(reading, modules, source)}
    return parts[0] if width in rows else 0


def _latent_head_size(
    reading: ModelReading, modules: Mapping[int, nn.Module], sources: Sequence[int], width: int
) -> int:
    """Return the size of a head's values in latent attention; else 0.

    There queries of a head are two parts, without and with positions, put together again or not, and another projection
    makes as many keys without positions, and the values.
    """
    for query, latent in permutations(sources, 2) if len(sources) == 2 else ():
        queries, values = reading.heads[query], reading.heads[latent]
        if len(values) != 2 or (len(queries) == 2 and queries[0] != values[0]) or sum(queries) <= values[0]:
            continue
        rows = [sum(_part_rows(reading, modules, source)) for source in (query, latent)]
        count = rows[0] // sum(queries)
        if rows == [count * sum(queries), count * sum(values)] and width == count * values[1]:
            return values[1]
    return 0


def _part_rows(reading: ModelReading, modules: Mapping[int, nn.Module], source: int) -> list[int]:
    """Return the rows of each part of a projection."""
    module = modules.get(source)
    total, split = 0 if module is None else outputs_of(module), reading.splits.get(source) or ()
    return [total // sum(split) * size for size in split] if split else [total]
