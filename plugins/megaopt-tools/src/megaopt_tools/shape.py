"""The sizes of the GPT that is trained; known without torch, so that the options can be."""

from __future__ import annotations

from attrs import frozen

__all__ = ["DEFAULT_SHAPE", "Shape"]


@frozen
class Shape:
    """The sizes of a GPT.

    Args:
        width: features of a token.
        layers: blocks.
        heads: attention heads of a block.
        expansion: hidden features of the feed-forward part.
    """

    width: int = 128
    layers: int = 4
    heads: int = 4
    expansion: int = 352


DEFAULT_SHAPE = Shape()
"""0.87 million parameters: small enough for two cores, large enough that optimizers differ."""
