"""The text that says how each shape is iterated: what stands in a group as `ns_plan`."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Final

from megaopt_core.errors import ConfigurationError

__all__ = ["METHODS", "ONEDNN", "joined_plans", "parsed_plan", "written_plan"]

ONEDNN: Final = "+onednn"

METHODS: Final = ("plain", "gram", f"plain{ONEDNN}", f"gram{ONEDNN}")
"""`plain`: step by step. `gram`: runs of steps on the Gram matrix, where the spectrum allows. `+onednn`: in float32, in
products of oneDNN's."""

_ITEM: Final = re.compile(
    rf"(?P<small>[0-9]{{1,18}})x(?P<large>[0-9]{{1,18}}):(?P<method>{'|'.join(map(re.escape, METHODS))})"
)

_MOST_ELEMENTS: Final = 1 << 48
"""Of a matrix: more than any memory holds."""


def parsed_plan(text: str) -> dict[tuple[int, int], str]:
    """Return the method of each shape `(smaller, larger)` that a text names.

    Args:
        text: as :func:`written_plan` writes it.

    Raises:
        ConfigurationError: it is not, or it names what cannot be a matrix, or two methods for one shape.

    Example:
        >>> parsed_plan("512x4096:gram")
        {(512, 4096): 'gram'}
    """
    if not isinstance(text, str):
        raise _refused(text, text)
    chosen: dict[tuple[int, int], str] = {}
    for item in text.split():
        found = _ITEM.fullmatch(item)
        if found is None:
            raise _refused(text, item)
        small, large, method = int(found["small"]), int(found["large"]), found["method"]
        if not (0 < small <= large and small * large <= _MOST_ELEMENTS):
            raise _refused(text, item, "; it names no matrix, whose smaller dimension comes first")
        if chosen.setdefault((small, large), method) != method:
            raise _refused(text, item, "; the same shape has another method before")
    return chosen


def _refused(text: object, item: object, why: str = "") -> ConfigurationError:
    return ConfigurationError.of(
        "ns_plan", text, f"{item!r} must read ROWSxCOLUMNS:METHOD with a method of {METHODS}{why}"
    )


def joined_plans(texts: Sequence[str]) -> str:
    """Return what several ranks say of the shapes that each steps; of what they say differently, what the first does.

    Args:
        texts: as :func:`written_plan` writes them.

    Raises:
        ConfigurationError: one of them is none.

    Example:
        >>> joined_plans(["512x4096:gram", "64x64:plain 512x4096:plain"])
        '64x64:plain 512x4096:gram'
    """
    return written_plan(
        {shape: name for text in reversed(texts) for shape, name in parsed_plan(text).items()}
    )


def written_plan(
    chosen: Mapping[tuple[int, int], str], shapes: Collection[tuple[int, int]] | None = None
) -> str:
    """Return the methods of shapes as one string.

    Args:
        chosen: the method of each shape `(smaller, larger)`.
        shapes: those to write; None: all.
    """
    shapes = chosen if shapes is None else shapes
    return " ".join(f"{small}x{large}:{chosen[small, large]}" for small, large in sorted(shapes))
