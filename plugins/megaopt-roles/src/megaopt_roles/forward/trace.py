"""What one evaluation has seen: calls, uses of parameters, pieces of projections."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from typing import Any

import torch
from attrs import define, field
from torch import nn

from megaopt_roles.forward.rank_signs import RankSigns
from megaopt_roles.forward.rows import is_bounded, numbered
from megaopt_roles.forward.sources.stored_weights import stored_weight
from megaopt_roles.forward.values import (
    ARGUMENT,
    JOINED,
    Call,
    Flow,
    Piece,
    Source,
    Use,
    Weight,
    deps_of,
    is_mark,
    weights_of,
)

__all__ = ["BATCH", "BudgetExceededError", "Trace", "error_of"]

BATCH = (2, 3, 4)
"""Sizes that stand in for batch, sequence and one more leading dimension."""
_MOST_ROWS = 100_000
_OF_ROWS = ("indexed", "looked_up", "sliced", "fixed", "elementwise", "beside")


class BudgetExceededError(Exception):
    """An evaluation took more steps than it is worth."""


@define(eq=False)
class Trace(RankSigns):
    """What one evaluation has seen.

    Args:
        rank: number of dimensions that activations of unknown shape are taken to have.
        budget: steps that are left.
        calls: calls of child modules, in order.
        uses: how each parameter, by identity, is used.
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
        gating: rows of bounded parts that multiply something, by identity of the owner.
        changes: the weight that the module which is read, a parametrization, is given; None for any other module.
        met: what products that sum, of two activations, depend on, and what meets itself in any product: no row of a
            weight meets an activation in these.
        compared: what the factors of products of two layers' outputs depend on.
        unit: what is divided by its own length depends on: directions.
        scored: what losses of classes depend on, each by what one layer returned.
        against: what one layer returned, each, that is held against what others did.
    """

    rank: int = 3
    budget: int = 20_000
    calls: list[Call] = field(factory=list)
    uses: dict[int, set[Use]] = field(factory=dict)
    sources: dict[int, Source] = field(factory=dict)
    cuts: dict[tuple[int, int], Source] = field(factory=dict)
    reads: list[tuple[nn.Module, str, Any]] = field(factory=list)
    silent: int = 0
    cut_off: int = 0
    sites: list[ast.expr] = field(factory=list)
    takers: dict[int, nn.Module | int | None] = field(factory=dict)
    masked: set[int] = field(factory=set)
    noisy: set[int] = field(factory=set)
    gating: dict[int, set[tuple[int, ...]]] = field(factory=dict)
    changes: Weight | None = None
    met: set[Any] = field(factory=set)
    compared: frozenset[Any] = frozenset()
    unit: frozenset[Any] = frozenset()
    scored: frozenset[Any] = frozenset()
    against: frozenset[Any] = frozenset()

    def note_read(self, owner: Any, name: str) -> None:
        """Note that a plain attribute of a module was read."""
        if not self.silent and isinstance(owner, nn.Module) and name in owner.__dict__ and name != "training":
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
        """Note the call of a child module."""
        call = Call(module, deps, len(self.calls), tuple(self.sites), cut_off=self.cut_off > 0)
        self.calls.append(call)
        return call

    def use(self, weight: Weight, use: Use) -> None:
        """Note how the parameters behind a weight are used.

        What is done to the rows of a product of parameters says nothing of its right-hand factor.
        """
        for param in weight.holders if use.kind in _OF_ROWS else weight.params:
            self.uses.setdefault(id(param), set()).add(use)

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
                call.by_row = by_row
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

    def is_contracted(self, param: nn.Parameter) -> bool:
        """True for a parameter that a product has contracted already."""
        return any(use.kind == "contracted" for use in self.uses.get(id(param), ()))

    def passed(self, weights: Iterable[Weight], *values: Any) -> Flow:
        """Note that weights go where they cannot be followed, and return what may have become of them."""
        found = list(weights)
        self.use_all(found, "passed")
        deps = deps_of(values)
        made = frozenset[Any]().union(*(self.weigh(weight, Flow(deps)) for weight in found)) if deps else deps
        return Flow(made or deps)

    def choose(self, scores: Flow, *, by_row: bool = False, stacks: bool = False) -> None:
        """Note weights whose products with activations became a softmax that chooses: learned queries or keys.

        Args:
            scores: the softmax.
            by_row: only those whose rows lie beside what they were multiplied with.
            stacks: keys may be in a stack, too: it chooses among the rows of one.
        """
        for dep in scores.deps:
            if not (isinstance(dep, Call) and isinstance(dep.module, nn.Parameter)):
                continue
            # Rows that lie beside what they met are queries, in a table or a stack.
            keys = dep.module.dim() == 2 or (stacks and dep not in self.met)
            if (dep.by_row and dep not in self.met) if by_row else keys:
                self.uses.setdefault(id(dep.module), set()).add(Use("attending"))

    def note_scores(self, deps: frozenset[Any]) -> None:
        """Note the projections that make together what a softmax is taken of: queries and keys, by which it chooses.

        Of one alone, and of several that lie side by side, the features are classes.

        Args:
            deps: what the softmax is taken of.
        """
        made = [dep.module for dep in deps if not is_mark(dep)]
        if len(made) == 1 or JOINED in deps:
            return
        for owner in made:
            self._note_owner(owner, "choosing")

    def note_memory(self, deps: frozenset[Any]) -> None:
        """Note stacks whose products lie beside the scores of others: they hold keys of a memory.

        Args:
            deps: what a softmax is taken of.
        """
        made = {dep for dep in deps if not is_mark(dep)}
        for dep in made - self.met if JOINED in deps and len(made) > 1 else ():
            if isinstance(dep.module, nn.Parameter) and dep.module.dim() > 2:
                self._note_owner(dep.module, "attending")

    def _note_owner(self, owner: nn.Module | nn.Parameter, kind: str) -> None:
        """Note one kind of use of the weight of a projection, or of a weight used by hand."""
        weight = stored_weight(owner) if isinstance(owner, nn.Module) else owner
        if weight is not None:
            self.uses.setdefault(id(weight), set()).add(Use(kind))

    def rectify(self, flows: Iterable[Flow]) -> None:
        """Note that an activation as hidden features go through is taken of what projections made."""
        for piece in (piece for flow in flows for piece in flow.pieces):
            self._note_owner(piece.source.owner, "rectified")

    def multiply(self, left: Any, right: Any, *, summed: bool = True) -> None:
        """Note what a product of two activations says of the projections that made them.

        Where two parts of one output meet, they are gates, or queries and keys. Where the outputs of different layers
        do, and are summed over, one is compared with the other, unless a softmax made one the shares of a mixture.

        Args:
            left: a factor.
            right: the other; what a part has become is known by where it came from.
            summed: the product sums over features.
        """
        if not (isinstance(left, Flow) and isinstance(right, Flow)):
            return
        self.met |= left.deps | right.deps if summed else left.deps & right.deps
        for one, other in ((left, right), (right, left)):
            self._pair(one, other, summed=summed)
        if summed and not (left.behind and right.behind):  # parts of what was lost sight of
            for dep in left.deps & right.deps:
                if not is_mark(dep):
                    self._note_owner(dep.module, "paired")
        if summed and not (left.soft or right.soft):
            self.compare(left.deps, right.deps)

    def _pair(self, one: Flow, other: Flow, *, summed: bool) -> None:
        """Note the parts of projections in a factor that meet other parts of the same, or that are gates."""
        others = {id(dep.module) for dep in other.deps if not is_mark(dep)}
        same = set(map(id, other.behind))
        for piece in one.behind:
            if piece.parent is None:
                continue
            if id(piece.source.owner) in others and id(piece) not in same:
                self._note_owner(piece.source.owner, "paired")
            if not summed and other.deps and is_bounded(piece):
                self._gate(piece)

    def _gate(self, piece: Piece) -> None:
        """Note a bounded part that multiplies an activation, where another part of the same does so, too: gates."""
        gates = self.gating.setdefault(id(piece.source.owner), set())
        gates.add(piece.rows)
        if len(gates) > 1:
            self._note_owner(piece.source.owner, "gating")

    def compare(self, left: frozenset[Any], right: frozenset[Any]) -> None:
        """Note that the outputs of different layers are compared, unless one of them is made of the other.

        Args:
            left: what one of them depends on.
            right: what the other depends on.
        """
        calls = [{dep for dep in deps if not is_mark(dep)} for deps in (left - right, right - left)]
        if all(calls) and not any(dep.deps & other for one, other in (calls, calls[::-1]) for dep in one):
            self.compared |= left | right
            self.against |= error_of(left, right)
        if not any(calls):  # what a layer makes of one thing, with what it makes of another
            self.compared |= left & right

    def loss(self, *values: Any, classes: bool) -> Flow:
        """Return a loss. What was given is no stream that a prediction adds to: it does not come through.

        Args:
            values: the first is the prediction; what several layers made together is not noted.
            classes: it takes logits or probabilities of classes.
        """
        self.use_all(weights_of(values), "elementwise")
        deps = deps_of(values[:1])
        if classes and len(deps) == 1 and not any(map(is_mark, deps)):
            self.scored |= deps
        elif not classes and len(values) > 1:
            given = deps_of(values[1])
            self._miss(error_of(deps, given), deps | given)
        found = deps_of(values)
        return Flow(frozenset(dep for dep in found if not is_mark(dep)) or found)

    def square(self, value: Any) -> None:
        """Note the prediction in an error that is squared, or whose size is taken: that is a loss.

        Args:
            value: any value.
        """
        if isinstance(value, Flow):
            self._miss(value.error, value.deps)

    def _miss(self, predicted: frozenset[Any], deps: frozenset[Any]) -> None:
        """Note predictions in an error, of what was given or of what the model made, too.

        Args:
            predicted: what single layers made.
            deps: what the error depends on.
        """
        if len(predicted) == 1 and all(map(is_mark, deps - predicted)):
            self.scored |= predicted
        else:
            self.against |= predicted

    def use_all(self, weights: Iterable[Weight], kind: str) -> None:
        """Note one kind of use of several weights."""
        for weight in weights:
            self.use(weight, Use(kind))

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
        return Flow(deps_of(values))


def error_of(left: frozenset[Any], right: frozenset[Any]) -> frozenset[Any]:
    """Return the predictions in a difference: what is made by one layer, less what was given or what others made.

    Args:
        left: what one of them depends on.
        right: what the other depends on.
    """
    made = [deps for deps in (left, right) if not all(map(is_mark, deps))]
    return frozenset[Any]().union(*(deps for deps in made if len(deps) == 1))
