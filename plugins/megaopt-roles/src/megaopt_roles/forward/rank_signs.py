"""Signs that an evaluation took activations to have a wrong number of dimensions, or the right one."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from attrs import define, field
from torch import nn

from megaopt_roles.forward.pieces import Piece
from megaopt_roles.forward.rows import lies_along
from megaopt_roles.forward.values import Flow, flows_of

__all__ = ["RankSigns"]


@define(eq=False)
class RankSigns:
    """What one evaluation has seen that tells features from positions.

    Args:
        misfits: owners, by identity, of whose rows a layer was given more or fewer than it takes.
        failed: features could not be given another shape: the rank may be wrong.
        along: owners, by identity, of what was cut into positions that hold all features.
        looped: owners, by identity, of features through parts of which a loop goes.
        fits: owners, by identity, of features of which a layer takes a part.
        counted: owners, by identity, of whose parts each got a name.
        miscounted: owners, by identity, of whose parts there were more or fewer than names.
        given: the first part of a piece that a layer of unknown width was given, by identity of layer and piece.
        taken: the first part of a piece that an index took, by identity of the index and the piece.
    """

    misfits: set[int] = field(factory=set)
    failed: bool = False
    along: set[int] = field(factory=set)
    looped: set[int] = field(factory=set)
    fits: set[int] = field(factory=set)
    counted: set[int] = field(factory=set)
    miscounted: set[int] = field(factory=set)
    given: dict[tuple[int, int], Piece] = field(factory=dict)
    taken: dict[tuple[int, int], Piece] = field(factory=dict)

    @property
    def wrong(self) -> set[int]:
        """The owners, by identity, of what shows that the rank is wrong."""
        return self.misfits | (self.miscounted - self.counted)

    def misfit(self, pieces: Iterable[Piece]) -> None:
        """Note pieces whose owners' rows were taken to have a wrong number of dimensions.

        Args:
            pieces: of any activations.
        """
        self.misfits.update(id(piece.source.owner) for piece in pieces)

    def expect(self, value: Any, width: int | None) -> None:
        """Note that a layer takes an activation of so many features.

        Args:
            value: what it is given.
            width: what it takes; None where that is not known.
        """
        for flow in (value, *value.terms) if isinstance(value, Flow) and width is not None else ():
            if flow.piece is not None and not _may_fit(flow, width or 0):
                self.misfit((flow.piece,))
            elif flow.piece is not None and flow.piece.parent is not None:
                self.fits.add(id(flow.piece.source.owner))

    def count(self, parts: list[Any], names: int, starred: int | None) -> None:
        """Note that parts of one thing are more or fewer than the names that they are assigned to: the rank is wrong.

        Not where each gets a name elsewhere: of two branches, one is of layers that were built otherwise.

        Args:
            parts: what is assigned.
            names: how many there are.
            starred: position of the name that takes several, if any.
        """
        owners = {
            id(part.piece.source.owner) for part in parts if isinstance(part, Flow) and part.piece is not None
        }
        if starred is None and len(owners) == 1:
            noted = self.counted if len(parts) == names else self.miscounted
            noted |= owners

    def part(self, whole: Flow, parts: list[Flow], dim: Any) -> None:
        """Note parts of an activation that hold all of its features: they are positions.

        Args:
            whole: the activation.
            parts: what it was cut into.
            dim: along which.
        """
        several = len(parts) > 1 or not lies_along(whole, dim)
        if whole.piece is not None and several and all(part.piece is whole.piece for part in parts):
            self.along.add(id(whole.piece.source.owner))

    def go_through(self, items: list[Any]) -> None:
        """Note parts of one thing that a loop goes through: it does the same with all of them.

        Args:
            items: what the loop sees.
        """
        found: dict[int, set[tuple[int, ...]]] = {}
        for piece in (flow.piece for item in items for flow in flows_of(item)):
            if piece is not None and piece.parent is not None:
                rows = found.setdefault(id(piece.parent), set())
                rows.add(piece.rows)
                if len(rows) > 1:
                    self.looped.add(id(piece.source.owner))

    def take(self, site: int, whole: Any, key: Any, part: Any) -> None:
        """Note a part that an index takes, of positions or, time and again at one place of a source, of features.

        Args:
            site: identity of the place.
            whole: what is indexed.
            key: the index.
            part: what it takes.
        """
        if (
            not (isinstance(whole, Flow) and isinstance(part, Flow))
            or whole.piece is None
            or part.piece is None
        ):
            return
        owner, keys = id(whole.piece.source.owner), key if isinstance(key, tuple) else (key,)
        plain = all(isinstance(item, int | slice) for item in keys)
        if part.piece is whole.piece:
            cut = [dim for dim, item in enumerate(keys) if plain and item != slice(None)]
            if cut and not any(lies_along(whole, dim) for dim in cut):
                self.along.add(owner)
        elif (
            len(part.piece.rows) > 1
            and self.taken.setdefault((site, id(whole.piece)), part.piece) is not part.piece
        ):
            self.looped.add(owner)

    def share(self, layer: nn.Module, value: Any) -> None:
        """Note that a layer of which it is not known how many features it takes is given an activation.

        Where it is given several parts of one, these are positions rather than features: the rank is wrong.

        Args:
            layer: the layer.
            value: what it is given.
        """
        piece = value.piece if isinstance(value, Flow) else None
        if piece is None or piece.parent is None or all(param.dim() < 2 for param in layer.parameters()):
            return
        before = self.given.setdefault((id(layer), id(piece.parent)), piece)
        if before is not piece:
            self.misfit((piece,))


def _may_fit(flow: Flow, width: int) -> bool:
    """False where the rows of an activation lie along its last axis, and are more or fewer than a layer takes."""
    tensor = flow.tensor
    if tensor is None or not tensor.dim() or not tensor.numel():
        return True
    size = tensor.shape[-1]
    if flow.reshaped and tensor.dim() > 1 and size < width and width % size == 0:
        return True  # features of several positions, of whose number another one stands in
    return size == width or (tensor.dim() > 1 and len(tensor.reshape(-1, size)[0].unique()) < size)
