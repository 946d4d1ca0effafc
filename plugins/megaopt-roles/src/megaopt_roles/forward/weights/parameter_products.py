"""Products of parameters alone: factors of a matrix, codes that a matrix makes something of."""

from __future__ import annotations

from collections.abc import Sequence

from attrs import evolve

from megaopt_roles.forward.dependencies import Call
from megaopt_roles.forward.trace import Trace
from megaopt_roles.forward.uses import Use
from megaopt_roles.forward.values import Axis, Weight
from megaopt_roles.forward.weights.contractions import contract
from megaopt_roles.forward.weights.forms import together
from megaopt_roles.forward.weights.mixtures import mixed_flat
from megaopt_roles.forward.weights.scales import combine

__all__ = ["factors", "function_of_parameters", "product_of_parameters"]


def product_of_parameters(trace: Trace, left: Weight, right: Weight) -> Weight:
    """Return the product of two parameters."""
    vector = left.shape is not None and sum(size > 1 for size in left.shape) < 2 and left.shape[-1:] != (1,)
    ranks = 1 if vector else len(left.shape or ()), len(right.shape or ())
    if set(map(id, left.params)) == set(map(id, right.params)):
        trace.use(left, Use("squared"))
    if ranks == (1, 2):  # a learned code, and the matrix that makes something of it
        made = tuple(param for param in left.params if trace.is_contracted(param))
        codes = tuple(param for param in left.params if not trace.is_contracted(param))
        trace.use(evolve(left, params=codes), Use("elementwise"))
        contract(trace, right, (0,), (1,))
        shape = None if right.shape is None else right.shape[1:]
        return Weight((*right.params, *made), shape, None, right.base)
    mixed = mixed_flat(trace, left, right)
    if mixed is not None:
        return mixed
    if max(ranks) > 2:  # all axes but the last two count products
        matrices = [tuple(range(rank))[-2:] for rank in ranks]
        factors(trace, ((left, matrices[0]), (right, matrices[1])))
    else:
        trace.use(left, Use("factor"))
        sides = [tuple(sorted(axis.indices)) for axis in right.axes or ()]
        into, out = sides if len(sides) == 2 else ((), ())
        trace.use(right, Use("factor", into, out))
    if ranks[1] != 2 or ranks[0] not in (0, 2):
        return combine(left, right)
    return _table(trace, left, right)


def factors(trace: Trace, operands: Sequence[tuple[Weight, Sequence[int]]]) -> None:
    """Note the factors of a batch of products of parameters alone.

    Args:
        trace: where it is noted.
        operands: each with the positions of its axes that do not count products. Where these are not two axes of the
            stored parameter, it holds a vector for each product, and what they make is a kernel, say.
    """
    for weight, positions in operands:
        stored = set(range(weight.base.dim() - 1))  # one of its axes counts, where they are not known
        if weight.axes is not None:
            stored = set[int]().union(*(weight.axes[i].indices for i in positions))
        known = tuple(stored) if weight.axes is not None else ()
        trace.use(weight, Use("factor") if len(stored) > 1 else Use("generated", known))


def _table(trace: Trace, left: Weight, right: Weight) -> Weight:
    """Return the product of two matrices: it has the rows of the left one, each made by the right one."""
    sizes = None if left.shape is None or right.shape is None else (left.shape[0], right.shape[1])
    axes = None if sizes is None else (Axis(0), Axis(1))
    made = frozenset(left.right) | left.deps
    held = {id(param) for param in left.params}
    calls = tuple(
        Call(param, made, len(trace.calls), tuple(trace.sites))
        for param in right.params
        if id(param) not in held
    )
    both = together((left, right))
    return evolve(both, shape=sizes, axes=axes, deps=left.deps | right.deps, right=(*left.right, *calls))


_BY_ENTRY = frozenset(["where", "maximum", "minimum", "complex", "polar", "atan2"])
"""Functions of several tensors that go entry by entry."""


def function_of_parameters(trace: Trace, name: str, found: Sequence[Weight]) -> Weight:
    """Return what another function makes of several parameters alone: a Kronecker product, say.

    Args:
        trace: where uses are noted.
        name: of the function.
        found: what it is given, two weights or more.
    """
    if name == "kron":
        trace.use_all(found, "factor")
    both = together(found)
    alike = all((weight.shape, weight.axes) == (both.shape, both.axes) for weight in found)
    return both if alike and name in _BY_ENTRY else evolve(both, shape=None, axes=None)
