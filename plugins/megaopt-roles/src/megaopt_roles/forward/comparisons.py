"""What one evaluation has seen of activations that meet: in products, softmaxes, differences and losses."""

from __future__ import annotations

from collections import Counter
from typing import Any

from attrs import define, evolve, field
from torch import nn

from megaopt_roles.forward.dependencies import ARGUMENT, JOINED, NUMBER, Call, is_mark
from megaopt_roles.forward.pieces import Piece
from megaopt_roles.forward.rows import is_bounded, lies_along
from megaopt_roles.forward.sources.stored_weights import stored_weight
from megaopt_roles.forward.uses import UseNotes
from megaopt_roles.forward.values import Flow, deps_of, weights_of

__all__ = ["Comparisons", "as_number", "error_of"]


@define(eq=False, slots=False)
class Comparisons(UseNotes):
    """What one evaluation has seen of activations that meet.

    Args:
        gating: rows of bounded parts that multiply something, by identity of the owner.
        met: what products that sum, of two activations, depend on, and what meets itself in any product: no row of a
            weight meets an activation in these.
        compared: what the factors of products of two layers' outputs depend on.
        unit: what is divided by its own length depends on: directions.
        scored: what losses of classes depend on, each by what one layer returned.
        against: what one layer returned, each, that is held against what others did.
        rests: what is taken from one depends on: a share, of which this is the rest.
        weighed: what each activation, by what it depends on, multiplies entry by entry.
        single: how often single features of what no row is known of multiply something, by what they depend on.
    """

    gating: dict[int, set[tuple[int, ...]]] = field(factory=dict)
    met: set[Any] = field(factory=set)
    compared: frozenset[Any] = frozenset()
    unit: frozenset[Any] = frozenset()
    scored: frozenset[Any] = frozenset()
    against: frozenset[Any] = frozenset()
    rests: set[frozenset[Any]] = field(factory=set)
    weighed: dict[frozenset[Any], set[frozenset[Any]]] = field(factory=dict)
    single: Counter[frozenset[Any]] = field(factory=Counter)

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
        if not summed:
            self.met |= left.deps & right.deps
        elif not (left.soft or right.soft):  # what a softmax weighs says nothing of its scores
            self.met |= left.deps | right.deps
        for one, other in ((left, right), (right, left)):
            self._pair(one, other, summed=summed)
            self._weigh(one, other, summed=summed)
            if not summed and self._lies_across(one):
                self.mix(one, other)
        if summed and not (left.behind and right.behind):  # parts of what was lost sight of
            for dep in left.deps & right.deps:
                if not is_mark(dep):
                    self.note_owner(dep.module, "paired")
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
                self.note_owner(piece.source.owner, "paired")
            if not summed and other.deps and is_bounded(piece):
                self._gate(piece)

    def _weigh(self, one: Flow, other: Flow, *, summed: bool) -> None:
        """Note the projections that made an activation which weighs others: by a share and its rest, or by scores.

        A part of an output says nothing of what makes the other parts.
        """
        if other.deps <= one.deps or any(piece.parent is not None for piece in one.behind):
            return
        if one.soft and all(_makes_one(dep.module) for dep in one.deps if not is_mark(dep)):
            self.note_all(one.deps, "weighing")
        if one.soft and summed:
            self.note_all(one.deps, "proportioning")
        others = self.weighed.setdefault(one.deps, set())
        others |= set() if summed else {other.deps}
        if one.deps in self.rests and len(others) > 1:
            self.note_all(one.deps, "sharing")

    def mix(self, shares: Any, mixed: Any) -> None:
        """Note the projections whose features are shares, where each of these weighs one of several activations.

        Args:
            shares: what multiplies them, its own features along an axis that counts these.
            mixed: what is multiplied.
        """
        if not (isinstance(shares, Flow) and isinstance(mixed, Flow)) or mixed.deps <= shares.deps:
            return
        if shares.soft or any(map(is_bounded, shares.pieces)):
            self.note_all(shares.deps - self.met, "weighing")

    def _lies_across(self, flow: Flow) -> bool:
        """True for shares whose features lie along another axis than the last, or of which several are met singly."""
        tensor = flow.tensor
        if tensor is None or tensor.dim() < 2 or tensor.shape[-1] != 1:
            return False
        if flow.piece is not None:
            gates = self.gating.get(id(flow.piece.source.owner), ())
            return lies_along(flow, -2) or len(gates) > 1
        self.single[flow.deps] += flow.soft
        owners = [dep.module for dep in flow.deps if not is_mark(dep) and not _makes_one(dep.module)]
        several = self.single[flow.deps] > 1 or any(tensor.shape[-2] in _sizes(owner) for owner in owners)
        return flow.soft and several

    def note_all(self, deps: frozenset[Any], kind: str) -> None:
        """Note one kind of use of what made a value.

        Args:
            deps: what the value depends on.
            kind: as `Use` has it.
        """
        for dep in deps:
            if not is_mark(dep):
                self.note_owner(dep.module, kind)

    def _gate(self, piece: Piece) -> None:
        """Note a bounded part that multiplies an activation, where another part of the same does so, too: gates."""
        gates = self.gating.setdefault(id(piece.source.owner), set())
        gates.add(piece.rows)
        if len(gates) > 1:
            self.note_owner(piece.source.owner, "gating")

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
        return as_number(Flow(frozenset(dep for dep in found if not is_mark(dep)) or found))

    def square(self, value: Any) -> None:
        """Note the prediction in an error that is squared, or whose size is taken: that is a loss.

        Of the product of a weight alone it is a form in what the weight met.

        Args:
            value: any value.
        """
        if not isinstance(value, Flow):
            return
        self._miss(value.error, value.deps)
        for dep in value.deps:
            if not is_mark(dep) and value.deps - {dep} <= dep.deps:
                self.note_owner(dep.module, "squared")

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

    def choose(self, scores: Flow, *, by_row: bool = False, stacks: bool = False) -> None:
        """Note weights whose products with activations became a softmax that chooses: learned queries or keys.

        Args:
            scores: the softmax.
            by_row: only those whose rows lie beside what they were multiplied with.
            stacks: keys may be in a stack, too: it chooses among the rows of one.
        """
        for dep in scores.deps - self.met:
            if not (isinstance(dep, Call) and isinstance(dep.module, nn.Parameter)):
                continue
            # Rows that lie beside what they met are queries, in a table or a stack.
            if dep.by_row if by_row else (stacks or dep.module.dim() == 2):
                self.note_owner(dep.module, "attending")

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
            self.note_owner(owner, "choosing")

    def note_memory(self, deps: frozenset[Any]) -> None:
        """Note stacks whose products lie beside the scores of others: they hold keys of a memory.

        Args:
            deps: what a softmax is taken of.
        """
        made = {dep for dep in deps if not is_mark(dep)}
        for dep in made - self.met if JOINED in deps and len(made) > 1 else ():
            if isinstance(dep.module, nn.Parameter) and dep.module.dim() > 2:
                self.note_owner(dep.module, "attending")


def _sizes(owner: nn.Module | nn.Parameter) -> tuple[int, ...]:
    """Return the sizes of the weight behind a call."""
    weight = stored_weight(owner) if isinstance(owner, nn.Module) else owner
    return () if weight is None else tuple(weight.shape)


def as_number(value: Flow) -> Flow:
    """Return a value as a loss, or as one number. What was given is no stream that goes through it."""
    made = value.deps - {ARGUMENT}
    return value if all(map(is_mark, made)) else evolve(value, deps=made | {NUMBER})


def _makes_one(owner: nn.Module | nn.Parameter) -> bool:
    """True for what makes one feature, a score."""
    sizes = _sizes(owner)
    return len(sizes) > 1 and sizes[0] == 1


def error_of(left: frozenset[Any], right: frozenset[Any]) -> frozenset[Any]:
    """Return the predictions in a difference: what is made by one layer, less what was given or what others made.

    Args:
        left: what one of them depends on.
        right: what the other depends on.
    """
    made = [deps for deps in (left, right) if not all(map(is_mark, deps))]
    return frozenset[Any]().union(*(deps for deps in made if len(deps) == 1))
