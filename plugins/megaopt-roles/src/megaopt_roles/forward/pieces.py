"""Rows of a projection, or of a weight, and pieces that are cut out of them."""

from __future__ import annotations

from attrs import define, field
from torch import nn

__all__ = ["Piece", "Source"]


@define(eq=False)
class Source:
    """What makes the rows of an activation: a projection, or a weight used by hand.

    Args:
        owner: the module, or the parameter.
        size: number of rows.
        root: all rows together.
    """

    owner: nn.Module | nn.Parameter
    size: int
    root: Piece = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.root = Piece(self, None, tuple(range(self.size)))


@define(eq=False)
class Piece:
    """Some rows of a source, cut out of a larger piece.

    Args:
        source: whose rows.
        parent: the piece that it was cut from; None for all rows.
        rows: the rows, ascending.
    """

    source: Source
    parent: Piece | None
    rows: tuple[int, ...]
    children: dict[tuple[int, ...], Piece] = field(factory=dict)
    heads: int = 0
    """Rows of a head, where the activation is shaped into heads; 0 where that was not seen, -1 where it is not so."""
    bounded: bool = False
    """A sigmoid or a tanh is taken of it, or of a sum that it is in."""
    merged: bool = False
    """The pieces that this one was cut into were put together again: the cut says nothing."""

    def cut(self, rows: tuple[int, ...]) -> Piece:
        """Return the piece of these rows, the same object every time."""
        if rows == self.rows:
            return self
        if rows not in self.children:
            self.children[rows] = Piece(self.source, self, rows)
        return self.children[rows]
