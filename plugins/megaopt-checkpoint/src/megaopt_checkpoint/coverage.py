"""Do boxes tile a tensor: is every element in exactly one of them?"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import product

from megaopt_core.params import Box

__all__ = ["tiles"]

_MOST_CUT = 12
"""Dimensions that boxes may be cut in: the work is two to this power for each box."""


def tiles(shape: Sequence[int], boxes: Iterable[Box]) -> bool:
    r"""Return whether every element of a shape is in exactly one box.

    The mixed difference of a box's indicator function is a signed point at each of its corners. A function of bounded
    support is known by its mixed difference, so boxes tile the shape if and only if their points add up to the shape's:

    $$\sum_b \sum_{c \in \mathrm{corners}(b)} (-1)^{\#\mathrm{ends}(c)} \delta_c
    = \sum_{c \in \mathrm{corners}(\mathrm{shape})} (-1)^{\#\mathrm{ends}(c)} \delta_c .$$

    Args:
        shape: of the tensor.
        boxes: `(offsets, sizes)`, each inside the shape; an empty one is allowed only where the shape is empty.

    Example:
        >>> tiles((4, 2), [((0, 0), (1, 2)), ((1, 0), (3, 1)), ((1, 1), (3, 1))])
        True
        >>> tiles((4, 2), [((0, 0), (2, 2)), ((1, 0), (2, 2))])
        False
    """
    boxes = list(boxes)
    if len(boxes) == 1 and boxes[0][1] == tuple(shape):
        return True
    if math.prod(shape) == 0:
        return all(math.prod(sizes) == 0 for _, sizes in boxes)
    if any(math.prod(sizes) == 0 for _, sizes in boxes):
        return False
    cut = [dim for dim, extent in enumerate(shape) if any(sizes[dim] != extent for _, sizes in boxes)]
    if not cut:
        return len(boxes) == 1
    if len(cut) > _MOST_CUT:
        return False
    points: Counter[tuple[int, ...]] = Counter()
    _add_corners(points, [(0, shape[dim]) for dim in cut], -1)
    for offsets, sizes in boxes:
        _add_corners(points, [(offsets[dim], offsets[dim] + sizes[dim]) for dim in cut], 1)
    return not any(points.values())


def _add_corners(points: Counter[tuple[int, ...]], ends: Sequence[tuple[int, int]], weight: int) -> None:
    for which in product((0, 1), repeat=len(ends)):
        corner = tuple(pair[end] for pair, end in zip(ends, which, strict=True))
        points[corner] += -weight if sum(which) % 2 else weight
