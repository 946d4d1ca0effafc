"""What one evaluation has seen: calls, uses of parameters, pieces of projections."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from typing import Any

import torch
from attrs import define, field
from torch import nn

from megaopt_roles.forward.comparisons import Comparisons
from megaopt_roles.forward.dependencies import ARGUMENT, Call, of_all
from megaopt_roles.forward.pieces import Source
from megaopt_roles.forward.rank_signs import RankSigns
from megaopt_roles.forward.rows import numbered
from megaopt_roles.forward.values import Flow, Weight, deps_of, flows_of, weights_of

__all__ = ["BATCH", "PLACES", "BudgetExceededError", "Trace"]

BATCH = (2, 3, 4)
"""Sizes that stand in for batch, sequence and one more leading dimension."""
PLACES = (4, 6, 7)
"""Sizes that stand in for those of images, one for each spatial axis."""
_MOST_ROWS = 100_000
_AGREED = ("training", "_modules", "_parameters", "_buffers")
"""Attributes of modules in which twins agree, or that do not matter."""


class BudgetExceededError(Exception):
    """An evaluation took more steps than it is worth."""


@define(eq=False)
class Trace(RankSigns, Comparisons):
    """What one evaluation has seen.

    Args:
        rank: number of dimensions that activations of unknown shape are taken to have.
        budget: steps that are left.
        calls: calls of child modules and products with weights, in order.
        sources: rows of projections and weights, by identity of the owner and axis.
        cuts: axes of weights that were cut before use, by identity of the parameter and axis.
        reads: plain attributes of modules that the result may depend on: `(module, name, value)`.
        silent: greater than zero while reads do not matter.
        cut_off: greater than zero where no gradient flows.
        sites: the calls and matrix products in the source that are being evaluated, the outermost first.
        takers: what takes the input of a module first, by identity, as far as it was asked for: all evaluations of
            one forward share it.
        masked: parameters, by identity, that something fixed of their shape multiplies.
        noisy: those that noise multiplies.
        told: what functions returned that were given nothing but numbers and activations, by what these were.
        changes: the weight that the module which is read, a parametrization, is given; None for any other module.
    """

    rank: int = 3
    budget: int = 20_000
    calls: list[Call] = field(factory=list)
    sources: dict[int, Source] = field(factory=dict)
    cuts: dict[tuple[int, int], Source] = field(factory=dict)
    reads: list[tuple[nn.Module, str, Any]] = field(factory=list)
    silent: int = 0
    cut_off: int = 0
    sites: list[ast.expr] = field(factory=list)
    takers: dict[int, nn.Module | int | None] = field(factory=dict)
    masked: set[int] = field(factory=set)
    noisy: set[int] = field(factory=set)
    told: dict[Any, Any] = field(factory=dict)
    changes: Weight | None = None

    def note_read(self, owner: Any, name: str) -> None:
        """Note that a plain attribute of a module was read."""
        if (
            not self.silent
            and isinstance(owner, nn.Module)
            and name in owner.__dict__
            and name not in _AGREED
        ):
            self.reads.append((owner, name, owner.__dict__[name]))

    def spend(self) -> None:
        """Count a step.

        Raises:
            BudgetExceededError: there were too many.
        """
        self.budget -= 1
        if self.budget < 0:
            raise BudgetExceededError

    def reserve(self, steps: int) -> int:
        """Keep all but some of the steps that are left; return how many, for the caller to add again.

        Args:
            steps: that what follows is worth.
        """
        kept = max(self.budget - steps, 0)
        self.budget -= kept
        return kept

    def call(self, module: nn.Module | nn.Parameter, deps: frozenset[Any]) -> Call:
        """Note the call of a child module, or a product with a weight."""
        call = Call(module, deps, len(self.calls), tuple(self.sites), cut_off=self.cut_off > 0)
        self.calls.append(call)
        return call

    def weigh(
        self, weight: Weight, *values: Any, by_row: bool = False, over_rows: bool = False
    ) -> frozenset[Any]:
        """Note a product with a weight as the calls that it amounts to, and return what its result depends on.

        Of a weight that is a product of parameters, one factor takes what the activation is, and the other one what
        the first makes of it.

        Args:
            weight: the weight.
            values: what it is multiplied with.
            by_row: its rows lie beside what they are multiplied with.
            over_rows: the product sums over its rows, so that those who hold them come first.
        """
        deps = deps_of((values, weight))
        holders = set(map(id, weight.holders))
        first = [param for param in weight.params if (id(param) in holders) is over_rows and param.dim() > 1]
        last = [
            param for param in weight.params if (id(param) in holders) is not over_rows and param.dim() > 1
        ]
        for params in (first, last) if first and last else (first + last,):
            calls = [self.call(param, deps) for param in params]
            for call in calls:
                call.by_row, call.stacked = by_row, len(weight.shape or ()) > 2
            deps = frozenset(calls)
        return deps

    def picked(self, weight: Weight, deps: frozenset[Any], width: int | None = None) -> Flow:
        """Return rows of a weight, which are activations: a right-hand factor of a product made them.

        Args:
            weight: the weight.
            deps: what they were picked by.
            width: elements of a row; None where that is not known.
        """
        tensor = None
        if width is not None and ARGUMENT in deps:
            tensor = torch.empty((*self.leading(None), width), device="meta")
        return Flow(deps | self.made(weight), tensor, picked=True)

    def made(self, weight: Weight) -> frozenset[Any]:
        """Return what the rows of a weight depend on as activations, the products that made them among it.

        Args:
            weight: the weight.
        """
        self.calls += [call for call in weight.right if call not in self.calls]
        return weight.deps | frozenset(weight.right)

    def passed(self, weights: Iterable[Weight], *values: Any) -> Flow:
        """Note that weights go where they cannot be followed, and return what may have become of them."""
        found = list(weights)
        self.use_all(found, "passed")
        deps = deps_of(values)
        made = frozenset[Any]().union(*(self.weigh(weight, Flow(deps)) for weight in found)) if deps else deps
        return Flow(made or deps)

    def leading(self, value: Any, rank: int | None = None) -> tuple[int, ...]:
        """Return the leading dimensions of what a projection makes of an activation."""
        tensor = value.tensor if isinstance(value, Flow) else None
        if tensor is not None and tensor.dim() > 0:
            return tuple(tensor.shape[:-1])
        return BATCH[: (rank or self.rank) - 1]

    def rows_of(
        self,
        owner: nn.Module | nn.Parameter,
        size: int,
        deps: frozenset[Any],
        leading: tuple[int, ...],
        trailing: tuple[int, ...] = (),
    ) -> Flow:
        """Return the output of a projection, with numbered rows."""
        total = size
        for extent in (*leading, *trailing):
            total *= max(extent, 1)
        if size > _MOST_ROWS or total > 40 * _MOST_ROWS:
            return Flow(deps, torch.empty((*leading, size, *trailing), device="meta"))
        source = self.sources.get(id(owner))
        if source is None or source.size != size:
            source = self.sources[id(owner)] = Source(owner, size)
        return Flow(deps, numbered(source, leading, trailing), source.root, fresh=True)

    def cut(self, param: nn.Parameter, axis: int, rows: tuple[int, ...]) -> None:
        """Note that an axis of a weight was cut."""
        source = self.cuts.get((id(param), axis))
        if source is None:
            source = self.cuts[id(param), axis] = Source(param, param.shape[axis])
        source.root.cut(rows)

    def unknown(self, *values: Any) -> Flow:
        """Return what is left to say about a mix of values: what it depends on."""
        return Flow(of_all(map(deps_of, (*flows_of(values), *weights_of(values)))))
