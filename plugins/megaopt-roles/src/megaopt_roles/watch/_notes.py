"""The record of a forward: all that it showed of its parameters."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from enum import StrEnum
from typing import NamedTuple

from attrs import Factory, define

from megaopt_roles.watch._values import Met, Run, Value

__all__ = ["Contraction", "Notes", "Use"]


class Use(StrEnum):
    """A thing that a parameter met."""

    CONTRACTED = "a product sums over it"
    INDEXED = "ids index it"
    ENTRIES = "it is combined with activations entry by entry"
    DEPTHWISE = "it filters each channel separately"
    MIXED = "a fixed tensor mixes its rows"
    PICKED = "a fixed index picks its rows"
    SCORING = "its product is added to scores before a softmax"
    UNKNOWN = "an operator from outside torch takes it"
    ROWS = "a layer takes its rows"
    EXPANDED = "it is repeated for every example"
    ATTENDED = "a softmax weighs its rows"
    CHOSEN = "a softmax chooses among its rows"
    SUMMED = "an entry-wise product with it is summed by hand"


class Contraction(NamedTuple):
    """The dimensions of a parameter that a product summed over, that became features, and that counted matrices."""

    ins: frozenset[int]
    outs: frozenset[int]
    batch: frozenset[int]


@define(eq=False)
class Notes:
    """All that a forward showed, by the identity of the parameter.

    Args:
        uses: what each parameter met.
        products: how products contracted it.
        inner: how products of parameters alone did.
        ends: the last products behind what the model returned, and how these were met.
        consumed: parameters whose product another product took.
        direct: those of them whose product it took as it was.
        adding: parameters whose product went back into a stream that it was computed from.
        uncertain_rows: weights that may be rows of an activation.
        cuts: the parts that were taken of each run, as `(first, length)`.
        cut_inside: the runs that were cut in a parameter itself.
        cut_from: the memories that these were cut from.
        whole: the memories that were used whole.
        rejoined: runs whose parts were put together again.
        obscured: parameters of whose product an index took features that nobody knows.
        heads: the size of the heads that a part was shaped into, by dimension and first index of the part.
        columns: how many features of each head of attention a weight took, where it took heads side by side.
        where: the module in which each of these was seen first.
        layers: the weights of layers.
        place: the module whose forward runs.
    """

    uses: defaultdict[int, set[Use]] = Factory(lambda: defaultdict(set))
    products: defaultdict[int, set[Contraction]] = Factory(lambda: defaultdict(set))
    inner: defaultdict[int, set[Contraction]] = Factory(lambda: defaultdict(set))
    ends: set[tuple[int, Met]] = Factory(set)
    consumed: set[int] = Factory(set)
    direct: set[int] = Factory(set)
    adding: set[int] = Factory(set)
    uncertain_rows: set[int] = Factory(set)
    cuts: defaultdict[Run, set[tuple[int, int]]] = Factory(lambda: defaultdict(set))
    cut_from: defaultdict[Run, set[int]] = Factory(lambda: defaultdict(set))
    whole: set[int] = Factory(set)
    cut_inside: set[Run] = Factory(set)
    rejoined: set[Run] = Factory(set)
    obscured: set[int] = Factory(set)
    heads: defaultdict[int, set[tuple[frozenset[tuple[Run, int]], int]]] = Factory(lambda: defaultdict(set))
    columns: defaultdict[int, set[int]] = Factory(lambda: defaultdict(set))
    where: dict[tuple[int, str], str] = Factory(dict)
    layers: frozenset[int] = frozenset()
    place: str = ""

    def use(self, params: Iterable[int], use: Use) -> None:
        """Note that parameters were used some way."""
        for param in params:
            self.uses[param].add(use)
            self.where.setdefault((param, use), self.place)

    def consume(self, value: Value, by: frozenset[int] = frozenset()) -> None:
        """Note that a product takes an activation."""
        for param in value.made_by - by:
            self.consumed.add(param)
            self.where.setdefault((param, "consumed"), self.place)
        self.direct |= {param for param, met in value.makers or () if met is Met.DIRECT} - by
        self.take(value)

    def take(self, value: Value) -> None:
        """Note that something is computed from an activation, which may be the whole of what was made."""
        if value.is_activation and not value.parts:
            self.whole.add(value.root)

    def add_to_stream(self, params: Iterable[int]) -> None:
        """Note that products go back into the stream that they were computed from."""
        for param in params:
            self.adding.add(param)
            self.where.setdefault((param, "adding"), self.place)

    def become_rows(self, value: Value) -> None:
        """Note that a weight turns out to be an activation: rows that the model learned, and what projected them."""
        self.use(value.rows, Use.ENTRIES)
        self.use(value.projected, Use.CONTRACTED)
        self.uncertain_rows |= {
            param for param in value.projected if not value.rows and Use.MIXED in self.uses[param]
        }

    def is_split(self, run: Run) -> bool:
        """Return whether the parts of a run were used apart, and never together."""
        return len(self.cuts[run]) > 1 and run not in self.rejoined and not self.cut_from[run] & self.whole
