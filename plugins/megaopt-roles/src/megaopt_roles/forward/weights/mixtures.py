"""Stacks of matrices that coefficients mix: of a few bases, a matrix for each of many relations, say."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from attrs import evolve

from megaopt_roles.forward.trace import Trace
from megaopt_roles.forward.uses import Use
from megaopt_roles.forward.values import Axis, Weight

__all__ = ["mixed_by_einsum", "mixed_flat", "mixture", "note_mixture"]


def mixture(
    trace: Trace, coefficients: Weight, stack: Weight, axis: int, made: int | None, first: int
) -> Weight:
    """Return the matrices that coefficients make of those of a stack.

    Args:
        trace: where uses are noted.
        coefficients: a weight whose other axis, if it has one, counts what is made.
        stack: a weight of three axes or more.
        axis: the position of its axis that the sum goes over.
        made: how many are made; None where one is, which has no axis for that.
        first: the position of the axis that counts them.
    """
    shape, axes = [*(stack.shape or ())], [*(stack.axes or ())]
    del shape[axis]
    mixed = axes.pop(axis)
    if made is not None:
        shape.insert(first, made)
        axes.insert(first, Axis(mixed.index))
    trace.use(coefficients, Use("mixing"))
    mixers = (*stack.mixers, (mixed.index, coefficients))
    return evolve(
        stack, shape=tuple(shape), axes=tuple(axes), deps=stack.deps | coefficients.deps, mixers=mixers
    )


def mixed_by_einsum(
    trace: Trace, operands: Sequence[Weight], terms: Sequence[str], result: str
) -> Weight | None:
    """Return what an einsum of coefficients and a stack makes (`rb,bio->rio`); None for any other."""
    if len(operands) != 2 or len(terms) != 2:
        return None
    for mine, other in ((0, 1), (1, 0)):
        coefficients, stack, own, term = operands[mine], operands[other], terms[mine], terms[other]
        shared = set(own) & set(term)
        if len(shared) != 1 or len(own) > 2 or len(own) != len(coefficients.shape or ()):
            continue
        summed = shared.pop()
        rest, made = term.replace(summed, ""), own.replace(summed, "")
        if summed not in result and result.replace(made or " ", "") == rest and _is_stack(stack, len(term)):
            count = (coefficients.shape or ())[own.index(made)] if made else None
            return mixture(
                trace, coefficients, stack, term.index(summed), count, result.index(made) if made else 0
            )
    return None


def mixed_flat(trace: Trace, coefficients: Weight, flat: Weight) -> Weight | None:
    """Return `coefficients @ stack.view(n, -1)`; None where the right-hand side is no stack whose matrices are flat."""
    if coefficients.base.dim() != 2 or flat.base.dim() < 3 or len(flat.axes or ()) != 2:
        return None
    counts, features = flat.axes or ()
    whole = counts == Axis(0) and features.indices == set(range(1, flat.base.dim()))
    if not whole or coefficients.shape is None or len(coefficients.shape) != 2:
        return None
    return mixture(trace, coefficients, flat, 0, coefficients.shape[0], 0)


def note_mixture(trace: Trace, weight: Weight, *sides: Collection[int]) -> bool:
    """Note what a product with a mixture says; true where its own axis is one of features, and no matrices are counted.

    Where it lies beside other axes, what it counts are matrices, that each make some of the features.

    Args:
        trace: where it is noted.
        weight: the weight in the product.
        sides: the stored axes that the product sums over, and those that it makes features of.
    """
    within = [mixer for index, mixer in weight.mixers if any({*side} == {index} for side in sides)]
    for mixer in within:
        trace.use(mixer, Use("factor"))
    if within:
        trace.use(weight, Use("factor"))
    return bool(within)


def _is_stack(weight: Weight, rank: int) -> bool:
    axes = weight.axes or ()
    return weight.base.dim() > 2 and len(axes) == rank > 2 and all(axis.rows is None for axis in axes)
