"""Einsum, whose letters say which axes of a weight it sums over."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, pairwise, permutations
from math import prod
from string import ascii_letters
from typing import Any

from attrs import evolve

from megaopt_roles.forward.rows import note_heads
from megaopt_roles.forward.trace import BATCH, Trace
from megaopt_roles.forward.uses import Use
from megaopt_roles.forward.values import Axis, Flow, Weight, deps_of, shape_of
from megaopt_roles.forward.weights.contractions import choose, contract, is_fixed, lookup, note_positions
from megaopt_roles.forward.weights.forms import reorder, together
from megaopt_roles.forward.weights.mixtures import mixed_by_einsum
from megaopt_roles.forward.weights.parameter_products import factors
from megaopt_roles.forward.weights.parts import widened
from megaopt_roles.forward.weights.products import product, samples_apart

__all__ = ["einsum", "lettered", "with_letters"]


def einsum(trace: Trace, equation: Any, operands: Sequence[Any]) -> Any:
    """Return `torch.einsum(equation, *operands)`."""
    operands = samples_apart(trace, operands)
    for operand in operands:
        trace.use_all(operand.moved if isinstance(operand, Flow) else (), "carried")
    found = [operand for operand in operands if isinstance(operand, Weight)]
    if len(found) == len(operands) > 1:  # a product of parameters alone
        return _of_parameters(trace, equation, found)
    deps = deps_of(operands)
    if len(found) == 1 and not deps and any(map(is_fixed, operands)):
        return lookup(trace, found[0])
    codes = [operand for operand in operands if isinstance(operand, Flow) and operand.one_hot]
    if codes and len(operands) == 2:
        trace.use_all(found, "indexed" if deps_of(codes) else "looked_up")
        return Flow(deps)
    terms, result = _subscripts(equation, len(operands))
    if terms and "..." not in equation:
        _expect(trace, operands, terms)
    _multiply(trace, operands, terms or (), result)
    _choose(trace, operands, terms, result)
    rows: Flow | None = None
    for position, operand in enumerate(operands):
        if not isinstance(operand, Weight):
            continue
        if terms is None:
            trace.use(operand, Use("contracted"))
            deps = trace.weigh(operand, Flow(deps))
            continue
        others = [(terms[at], other) for at, other in enumerate(operands) if at != position]
        _note_positions(trace, operand, terms[position], operands, terms, result)
        made = _einsum_operand(trace, operand, terms[position], others, result, deps)
        if made is not None:
            rows = made
            deps = made.deps
    return rows if rows is not None and rows.piece is not None else Flow(deps)


def _expect(trace: Trace, operands: Sequence[Any], terms: Sequence[str]) -> None:
    """Note activations that have not as many axes as letters: the rank is wrong."""
    for operand, term in zip(operands, terms, strict=True):
        shape = shape_of(operand) if isinstance(operand, Flow) else None
        if shape is not None and len(shape) != len(term):
            trace.misfit(operand.pieces)


def _of_parameters(trace: Trace, equation: Any, operands: Sequence[Weight]) -> Weight:
    """Return an einsum of parameters alone."""
    terms, result = _subscripts(equation, len(operands))
    as_matrices = _as_matrices(operands, terms or [], result)
    if as_matrices is not None:
        made: Weight = product(trace, *as_matrices)
        return made
    mixed = mixed_by_einsum(trace, operands, terms or [], result)
    if mixed is not None:
        return mixed
    counting = set(result).intersection(*terms or ())
    if terms and counting:
        apart = [[i for i, letter in enumerate(term) if letter not in counting] for term in terms]
        factors(trace, tuple(zip(operands, apart, strict=True)))
    else:
        trace.use_all(operands, "factor")
    known = {
        letter: size
        for term, operand in zip(terms or [], operands, strict=False)
        for letter, size in zip(term, operand.shape or (), strict=False)
    }
    shape = tuple(known[letter] for letter in result) if terms and known.keys() >= set(result) else None
    deps = frozenset[Any]().union(*(operand.deps for operand in operands))
    return evolve(together(operands), shape=shape, axes=None, deps=deps)


def _as_matrices(operands: Sequence[Weight], terms: Sequence[str], result: str) -> list[Weight] | None:
    """Return the factors of `left @ right`, in order and each turned as it has to be; None for any other einsum."""
    shared = set(terms[0]).intersection(terms[1]) - set(result) if len(terms) == 2 else set[str]()
    if len(shared) != 1 or len(set(result)) != 2 or any(len({*term}) != 2 != len(term) for term in terms):
        return None
    if any(len(operand.shape or ()) != 2 for operand in operands):
        return None
    summed, rows, columns = shared.pop(), result[0], result[1]
    found = dict(zip(terms, operands, strict=True))
    wanted = [(rows + summed, summed + rows), (summed + columns, columns + summed)]
    parts = [
        found[term] if term == straight else reorder(found[term], (1, 0))
        for straight, turned in wanted
        for term in (straight, turned)
        if term in found
    ]
    return parts if len(parts) == 2 else None


def lettered(args: Sequence[Any]) -> tuple[str | None, list[Any]]:
    """Return equation and operands of `torch.einsum(a, [0, 1], b, [1, 2], [0, 2])`; None for what is not known."""
    operands, lists = args[0 : len(args) // 2 * 2 : 2], [*args[1::2], *(args[-1:] if len(args) % 2 else ())]
    terms = [
        "".join("..." if item is Ellipsis else ascii_letters[item] for item in part)
        for part in lists
        if isinstance(part, list | tuple) and all(item is Ellipsis or isinstance(item, int) for item in part)
    ]
    count = len(operands)
    equation = "->".join([",".join(terms[:count]), *terms[count:]]) if len(terms) == len(lists) else None
    return equation, list(operands)


def with_letters(pattern: str) -> str | None:
    """Return the equation that `einops.einsum` means by names of axes; None where an axis has no name.

    Example:
        >>> with_letters("batch pos d, head d k -> batch pos head k")
        'abc,dce->abde'
    """
    letters: dict[str, str] = {}
    words = pattern.replace(",", " , ").replace("->", " -> ").split()
    names = [word for word in words if word not in (",", "->", "...")]
    if len(set(names)) > len(ascii_letters) or not all(name.isidentifier() for name in names):
        return None
    for name in names:
        letters.setdefault(name, ascii_letters[len(letters)])
    return "".join(letters.get(word, word) for word in words)


def _multiply(trace: Trace, operands: Sequence[Any], terms: Sequence[str], result: str) -> None:
    """Note what activations meet, and which of them weigh what others hold: those of which features count these."""
    for (one, own), (other, term) in permutations(zip(operands, terms, strict=False), 2):
        if own[-1:] in {*term[:-1]} - {*result} and result[-1:] not in {*own}:
            trace.mix(one, other)
    for left, right in combinations(operands, 2):
        trace.multiply(left, right)


def _choose(trace: Trace, operands: Sequence[Any], terms: list[str] | None, result: str) -> None:
    """Note what a softmax chooses among: rows of weights, or positions where its own last axis is kept."""
    for position, operand in enumerate(operands):
        if not isinstance(operand, Flow) or not operand.soft:
            continue
        term = terms[position] if terms else ""
        for weight, own in zip(operands, terms or [""] * len(operands), strict=True):
            if isinstance(weight, Weight):
                whole = len(own) == len(weight.shape or ())
                summed = [i for i, letter in enumerate(own) if whole and letter in set(term) - set(result)]
                choose(trace, weight, operand, summed)
        if term[-1:] in set(result) and set(term) - set(result):
            trace.choose(operand)


def _note_positions(
    trace: Trace, weight: Weight, own: str, operands: Sequence[Any], terms: Sequence[str], result: str
) -> None:
    """Note a weight under something fixed whose einsum with an activation sums over positions, or several axes."""
    for operand, term in zip(operands, terms, strict=True):
        summed = [at - len(term) for at, letter in enumerate(term) if letter in own and letter not in result]
        several = len(summed) > 1 or term[-1:] in result
        if summed and operand is not weight:
            note_positions(trace, weight, operand, summed, unless_known=several)


def _einsum_operand(
    trace: Trace,
    operand: Weight,
    term: str,
    others: Sequence[tuple[str, Any]],
    result: str,
    deps: frozenset[Any],
) -> Flow | None:
    """Note how one operand of an einsum is used, beside the others; return what it makes when it is a matrix."""
    if operand.deps:  # picked for each entry, as experts are for each token: these count axes, too
        operand = widened(operand, len(term))
    if operand.shape is None or len(term) != len(operand.shape):
        several = operand.axes is None or len({axis.index for axis in operand.axes} - {-1}) > 1
        contracted = several and set(term) - set(result)
        trace.use(operand, Use("contracted" if contracted else "elementwise"))
        return None
    shared = set[str]().union(*(letters for letters, _ in others))
    met = set[str]().union(*(letters for letters, other in others if deps_of(other)))
    into = [i for i, letter in enumerate(term) if letter in shared and letter not in result]
    out = [i for i, letter in enumerate(term) if letter not in met and letter in result]
    scales = any(isinstance(other, Weight) and {*term} < {*letters} for letters, other in others)
    if not into or scales:
        trace.use(operand, Use("elementwise"))
        return None
    if len(into) > 1 and not out:  # a form in two vectors
        out, into = into[:-1], into[-1:]
        contract(trace, operand, into, out)
        return Flow(trace.weigh(operand, Flow(deps)))
    if not contract(trace, operand, into, out):
        return None
    by_row = result[-1:] not in {term[i] for i in out}
    deps = trace.weigh(operand, Flow(deps), by_row=by_row, over_rows=into == [0])
    return _rows(trace, operand, term, out, result, deps)


def _rows(
    trace: Trace, operand: Weight, term: str, out: Sequence[int], result: str, deps: frozenset[Any]
) -> Flow:
    """Return what an einsum makes of a weight, with numbered rows: those of several axes in the order of the memory.

    Where they do not lie side by side there, the first axis of a stack counts matrices, each of which has such rows.
    """
    stored = [] if operand.axes is None else [operand.axes[i] for i in out]
    whole = all(axis.rows is None and axis.index >= 0 for axis in stored)
    if [axis.index for axis in stored] == [0, 2] and whole and operand.base.dim() == 3:
        stored, out = stored[1:], out[1:]
    in_order = _side_by_side(stored)
    known = dict(zip(term, operand.shape or (), strict=True))
    made = "".join(term[i] for i in out)
    letters = "".join(letter for letter in result if letter not in made)
    sizes = [known.get(letter, size) for letter, size in zip(letters, (*BATCH, 4, 6, 7), strict=False)]
    if not stored or not whole or not in_order or len(sizes) != len(letters) or len({*result}) != len(result):
        return Flow(deps)
    extents = [known[letter] for letter in made]
    flat = trace.rows_of(operand.base, prod(extents), deps, tuple(sizes))
    if flat.tensor is None:
        return Flow(deps)
    apart = flat.tensor.view(*sizes, *extents)
    note_heads(flat, apart)
    order = [(letters + made).index(letter) for letter in result]
    return evolve(flat, tensor=apart.permute(order).contiguous(), fresh=False)


def _side_by_side(axes: Sequence[Axis]) -> bool:
    """True for axes that follow each other in the memory of a weight."""
    return all(later.index == axis.index + 1 for axis, later in pairwise(axes))


def _subscripts(equation: Any, count: int) -> tuple[list[str] | None, str]:
    if not isinstance(equation, str):
        return None, ""
    equation = equation.replace(" ", "").replace("...", "")
    left, arrow, result = equation.partition("->")
    terms = left.split(",")
    if not arrow:
        letters = "".join(terms)
        result = "".join(sorted(letter for letter in set(letters) if letters.count(letter) == 1))
    return (terms if len(terms) == count else None), result
