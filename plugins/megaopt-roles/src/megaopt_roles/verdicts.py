"""The role of a parameter, from all that a watched forward showed of it."""

from __future__ import annotations

from attrs import evolve, frozen

from megaopt_core.params import Doubt, MatrixView, NamedParam, Role, RoleDecision
from megaopt_roles.views import seen_view
from megaopt_roles.watch import Met, Notes, Use

__all__ = ["verdict", "with_view"]


_UNSEEN = "the matrices inside it were not seen"
_FEW = 4
"""Features that no hidden layer gives so few of, but boxes and colours do."""


@frozen
class _Seen:
    """Everything that was seen of one parameter, over all objects that share its memory."""

    keys: frozenset[int]
    notes: Notes

    @property
    def uses(self) -> set[Use]:
        return set[Use]().union(*(self.notes.uses.get(key, set()) for key in self.keys))

    def at(self, what: str) -> str:
        """Return " at layers.3" for the module where something was seen first."""
        place = next((p for key in self.keys if (p := self.notes.where.get((key, what)))), "")
        return f" at {place}" if place else ""

    def view(self, entry: NamedParam, base: MatrixView | None) -> MatrixView | None:
        if self.keys & self.notes.obscured:
            return None
        key = next((key for key in self.keys if self.notes.products.get(key)), id(entry.param))
        return seen_view(tuple(entry.param.shape), key, self.notes, base)


def _seen(entry: NamedParam, notes: Notes) -> _Seen:
    return _Seen(frozenset({id(entry.param), *map(id, entry.twins)}), notes)


def with_view(entry: NamedParam, found: RoleDecision, notes: Notes) -> RoleDecision:
    """Return a decision whose role is certain with the view that a forward shows.

    Args:
        entry: the parameter.
        found: what is known of it.
        notes: what the forward showed.
    """
    seen = _seen(entry, notes)
    if found.role is not Role.MATRIX or Use.CONTRACTED not in seen.uses:
        return found
    unstated = found.doubt is Doubt.LAYOUT and entry.param.dim() > 2
    view = seen.view(entry, None if unstated else found.view)
    if view is None:
        return found if found.uncertain else found.doubted(_UNSEEN, Doubt.LAYOUT)
    settled = Doubt.NONE if found.doubt is Doubt.LAYOUT else found.doubt
    reason = found.reason if found.doubt is not Doubt.LAYOUT else found.reason.partition("; ")[0]
    reason += _parts(view) if view != found.view else ""
    return evolve(found, view=view, doubt=settled, reason=reason)


def _parts(view: MatrixView | None) -> str:
    return (
        f"; {len(view.split_sizes)} parts of its output are used separately"
        if view and view.split_sizes
        else ""
    )


def verdict(entry: NamedParam, notes: Notes, base: MatrixView | None = None) -> RoleDecision | None:
    """Return what a parameter is; None where the forward did not use it.

    Args:
        entry: the parameter, of two or more dimensions.
        notes: what the forward showed.
        base: the view that its layer says; None: it is no layer's.
    """
    seen, shape = _seen(entry, notes), tuple(entry.param.shape)
    uses = seen.uses
    if not uses or Use.UNKNOWN in uses:
        return None
    if sum(size > 1 for size in shape) < 2 and base is None:
        return RoleDecision.elementwise("one row")
    if Use.INDEXED in uses:
        return RoleDecision.embedding(f"{Use.INDEXED}{seen.at(Use.INDEXED)}")
    if not uses & {Use.CONTRACTED, Use.ATTENDED} or (Use.CONTRACTED not in uses and base is None):
        use = next((use for use in (Use.DEPTHWISE, Use.ATTENDED, Use.ROWS, Use.ENTRIES) if use in uses), None)
        return RoleDecision.elementwise(f"{use}{seen.at(use)}" if use else "no matrix product uses it")
    if base is None and (tables := uses & {Use.PICKED, Use.SCORING}) and len(shape) == 2:
        return RoleDecision.elementwise(f"a table: {min(tables)}{seen.at(min(tables))}")
    if base is None and ((Use.EXPANDED in uses and shape[0] == 1) or Use.ATTENDED in uses):
        return RoleDecision.elementwise(
            f"tokens: repeated for every example, or weighed by a softmax{seen.at(Use.ATTENDED)}"
        )
    if Use.CHOSEN in uses and entry.owners and base is None:
        return RoleDecision.elementwise(f"{Use.CHOSEN}: learned queries, or a projection").doubted()
    if notes.uncertain_rows & seen.keys and not any(
        product.ins or product.outs for key in seen.keys for product in notes.products.get(key, ())
    ):
        return RoleDecision.elementwise(
            "a fixed tensor picks its rows, and the result is an activation"
        ).doubted()
    return _contracted(entry, seen, uses, base)


def _contracted(entry: NamedParam, seen: _Seen, uses: set[Use], base: MatrixView | None) -> RoleDecision:
    """Return what a parameter is that a product sums over: hidden, or a head."""
    notes, shape = seen.notes, tuple(entry.param.shape)
    projected, adding = notes.consumed & seen.keys, notes.adding & seen.keys
    view = seen.view(entry, base)
    where = "its output is added to the residual stream" if adding else "its output feeds a product"
    where += seen.at("adding" if adding else "consumed")
    hidden = RoleDecision.matrix(f"{where}{_parts(view)}", view or base or MatrixView())
    if view is None:
        hidden = hidden.doubted(_UNSEEN, Doubt.LAYOUT)
    ended = {met for key, met in notes.ends if key in seen.keys}
    if uses & {Use.ENTRIES, Use.SUMMED}:
        mixed = RoleDecision.elementwise("it is used both in a product and entry by entry")
        return (hidden if projected else mixed).doubted()
    if adding:
        few = len(shape) == 2 and shape[0] <= _FEW and Met.DIRECT in ended
        return (
            hidden.doubted("its output has few features, and the model also returns them") if few else hidden
        )
    if projected:
        returned = ended & {Met.DIRECT, Met.GATED} and notes.direct & seen.keys
        return hidden.doubted("the model also returns its output") if returned else hidden
    if ended and ended <= {Met.SCALED}:
        return evolve(hidden, reason="only a norm stands between its output and the model's output").doubted()
    if ended:
        head = RoleDecision.output("its output is the model's output: no layer takes it")
        if len(shape) == 2 and shape[0] == shape[1]:
            return head.doubted("its input and output are equally wide: it may be hidden in a larger model")
        return (
            head
            if ended & {Met.DIRECT, Met.SCORED}
            else head.doubted("the model combines its output with other outputs")
        )
    return evolve(hidden, reason="no layer takes its output").doubted()
