"""Bare parameters: what their uses in forward say that they are."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from attrs import evolve
from torch import nn

from megaopt_core.params import MATRIX, Doubt, MatrixView, RoleDecision
from megaopt_core.routing import doubted, elementwise, embedding, matrix
from megaopt_roles.forward.uses import Use

__all__ = ["by_uses", "is_stack_bias"]


def by_uses(shape: tuple[int, ...], uses: Collection[Use], *, readable: bool = False) -> RoleDecision:
    """Decide what a bare parameter of two or more dimensions is.

    Args:
        shape: of the parameter.
        uses: how forward uses it.
        readable: the source of its module could be read to the end.
    """
    kinds = {use.kind for use in uses}
    if sum(size > 1 for size in shape) < 2:
        return elementwise(f"a gain of shape {list(shape)}")
    if kinds & {"contracted", "factor"}:
        return _contracted(shape, uses, kinds)
    if "passed" in kinds and not kinds & {"depthwise", "indexed"}:
        return _unread(shape, "is passed to a function whose source cannot be read")
    if "generated" in kinds <= {"generated", "elementwise", "looked_up", "sliced", "shortened", "returned"}:
        return _of_vectors(uses)
    for kind, decision in _KINDS.items():
        if kind in kinds:
            return decision
    if readable:
        return doubted(elementwise("a bare parameter that forward does not use"))
    return _unread(shape, "is not used in any source that can be read")


_BY_POSITION = elementwise("a table that is looked up by position: no matrix product contracts it")
_KINDS = {  # of what no product contracts; the first that fits
    "depthwise": elementwise("kernel of a depthwise convolution"),
    "indexed": embedding("a table that its module indexes with what it is given"),
    "generated": doubted(
        elementwise("a batch of vectors, of which a product of parameters makes a kernel, say")
    ),
    "mixing": elementwise("coefficients that mix the matrices of a stack"),
    "fixed": doubted(elementwise("a table that is multiplied with something fixed")),
    "noise": elementwise("it scales noise, or a gradient, that is added to a weight"),
    "attending": doubted(elementwise("learned queries, keys or values: only attention meets them")),
    "row": doubted(elementwise("its rows meet activations one by one")),
    "moved": doubted(elementwise("activations are added to it, and a product takes the sum for a weight")),
    "grouped": elementwise("scales or offsets of groups of something fixed"),
    "elementwise": elementwise("no matrix product contracts it"),
    "beside": elementwise("no matrix product contracts it"),
    "modulated": elementwise("no matrix product contracts it"),
    "looked_up": _BY_POSITION,
    "sliced": _BY_POSITION,
    "shortened": _BY_POSITION,
    "cropped": _BY_POSITION,
    "expanded": doubted(elementwise("a table that is expanded")),
    "measured": doubted(elementwise("only how large it is, is used")),
    "penalized": elementwise("only one number is made of it"),
    "returned": elementwise("its module returns it as it is: no matrix product contracts it"),
}


def _of_vectors(uses: Collection[Use]) -> RoleDecision:
    """Return the decision for what holds a vector for each product of parameters, and no activation multiplies."""
    decision = _KINDS["generated"]
    known = all(use.inputs for use in uses if use.kind == "generated")
    return evolve(decision, doubt=Doubt.NONE) if known else decision


def is_stack_bias(module: nn.Module, shape: tuple[int, ...], uses: Mapping[int, Collection[Use]]) -> bool:
    """True for a bias `[experts, n]` of a module that holds a stack `[experts, ...]` with one axis of n.

    Args:
        module: the owner of the parameter.
        shape: of the parameter.
        uses: how every parameter is used, by identity.
    """
    if len(shape) != 2:
        return False
    for param in module._parameters.values():
        if (
            param is not None
            and param.dim() > 2
            and param.shape[0] == shape[0]
            and shape[1] in param.shape[1:]
        ):
            kinds = {use.kind for use in uses.get(id(param), ())}
            if "contracted" in kinds:
                return True
    return False


def _settled(uses: Collection[Use], kinds: set[str]) -> RoleDecision | None:
    """Return the decision for what a product contracts, and what another use of it says more of."""
    if "grouped" in kinds and not any(use.inputs for use in uses):
        return _KINDS["grouped"]
    if {"triangular", "squared"} <= kinds:
        return doubted(elementwise("a triangle of it makes squares: it may be the root of a covariance"))
    return None


def _blended(shape: tuple[int, ...]) -> RoleDecision:
    """Return the decision for a stack that a softmax mixes; of three axes, two are those of each matrix."""
    found = matrix("a stack of matrices that a softmax mixes", MatrixView(batch_dims=1))
    why = "which axes a product with what it makes sums over is not known"
    return found if len(shape) == 3 else doubted(found, why, Doubt.LAYOUT)


def _contracted(shape: tuple[int, ...], uses: Collection[Use], kinds: set[str]) -> RoleDecision:
    settled = _settled(uses, kinds)
    if settled is not None:
        return settled
    exact = sorted(
        (use for use in uses if use.kind == "contracted" and use.inputs),
        key=lambda use: (-max(use.inputs), use.outputs, use.batch, use.block or 0),
    )
    if "indexed" in kinds and len(shape) == 2:
        table = embedding("a table that its module indexes with what it is given")
        over_rows = bool(exact) and all(use.inputs == (0,) for use in exact)
        return (
            doubted(table, "products sum over its rows: of features, it is a matrix") if over_rows else table
        )
    also = _also(
        (kinds - {"shortened"}) | _cut_elsewhere(uses, exact) | _cut_by_position(shape, uses, exact),
        stack=(len(shape) > 2 and shape[0] > 1) or any(use.block for use in exact),
        kernel=bool(exact) and len(shape) > 2 and all(use.outputs == (0,) and not use.batch for use in exact),
    )
    if also:
        return doubted(elementwise(f"a matrix product contracts it, but it is also {also}"))
    if "blended" in kinds and {use.inputs for use in exact} == {(0,)}:
        return _blended(shape)
    if not exact:
        view = MATRIX if len(shape) == 2 else MatrixView(batch_dims=len(shape) - 2)
        if "factor" in kinds and len(shape) == 2:
            if "softened" in kinds:
                return doubted(
                    elementwise("a softmax is taken of its product with a parameter: codes of nodes, say")
                )
            made = {use.inputs for use in uses if use.kind == "factor" and use.inputs}
            turned = made == {(0,)}  # it makes features of the rows of a left-hand factor
            return matrix("a factor of a matrix product", MatrixView(transposed=True) if turned else view)
        return doubted(matrix("a matrix product contracts it, over axes that were not found", view))
    view, sure = _oriented(shape, exact[0])
    if not sure and not view.batch_dims:  # its matrices, if it holds any, do not lie one after the other
        return doubted(elementwise("a matrix product contracts it, but its axes fit no view"))
    what = (
        "a stack of matrices that products contract" if view.batch_dims else "a matrix product contracts it"
    )
    if view.transposed:
        what += ", stored [in, out]"
    return matrix(what, view) if sure else _unsure(matrix(what, view), exact[0])


def _unsure(decision: RoleDecision, use: Use) -> RoleDecision:
    """Return a decision whose view does not say all of a product, in doubt of what is not known."""
    into = set(use.inputs)
    if into == set(range(len(into))) and not use.batch:
        return doubted(
            matrix("a matrix product contracts it", MatrixView(transposed=True, first_dims=len(into))),
            "it sums over the first axes: of heads, which make one matrix, or of experts, which do not",
            Doubt.LAYOUT,
        )
    assert decision.view is not None  # noqa: S101 - a matrix has one
    if into & set(range(decision.view.batch_dims)):
        return doubted(
            elementwise("a matrix product contracts it, but no view has its axes"), "", Doubt.LAYOUT
        )
    leading = decision.view.batch_dims
    if into == {leading} and not use.batch and set(use.outputs) == set(range(len(use.outputs) + 1)) - into:
        return doubted(decision, "what its first axes count makes features as its last ones do", Doubt.LAYOUT)
    return doubted(decision, "its axes fit no view")


def _cut_elsewhere(uses: Collection[Use], products: Collection[Use]) -> set[str]:
    """Return `sliced` for a weight that is cropped along other axes than its products have on both sides."""
    square = {axis for use in products for axis in (*use.inputs, *use.outputs)}
    return {"sliced" for use in uses if use.kind == "cropped" and set(use.inputs) != square}


def _cut_by_position(shape: tuple[int, ...], uses: Collection[Use], products: Collection[Use]) -> set[str]:
    """Return `shortened` for a stack of which an axis is cut that its products make, as tables of positions have one.

    Of two axes, any is one that is sliced.
    """
    cut = {axis for use in uses if use.kind == "shortened" for axis in use.inputs}
    if len(shape) == 2:
        return {"sliced"} if cut else set()
    made = {axis for use in products for axis in use.outputs}
    return {"shortened"} if cut & made else set()


def _also(kinds: set[str], *, stack: bool, kernel: bool) -> str:
    """Return what else is done with a weight that a product contracts, in words; empty where that says nothing.

    Experts of a stack are looked up one by one, and their rows sliced: that makes no table of it. A kernel is no stack
    where its entries are used, as those of prototypes are for a distance.
    """
    words = {
        "sliced": "sliced by position",
        "shortened": "sliced by position",
        "expanded": "expanded over the batch",
        "looked_up": "looked up by position",
        "elementwise": "used element by element",
        "noise": "a scale of noise, or of a gradient",
        "grouped": "a scale or an offset of groups of something fixed",
        "beside": "laid beside activations",
        "fixed": "multiplied with something fixed",
        "masked": "scaled by something fixed, for a sum over positions: it may weigh the edges of a graph",
        "padded": "padded by position",
        "attending": "part of a softmax that chooses: it may be learned queries, keys or values",
        "softened": "made proportions by a softmax",
        "passed": "passed to a function whose source cannot be read",
        "returned": "returned as it is",
        "generated": "a batch of vectors in a product of parameters",
        "carried": "a state that activations are added to",
        "ranked": "compared, and the best ones looked up",
    }
    silent = {"looked_up", "sliced", "expanded", "elementwise", "returned", "padded"} if stack else set()
    silent -= {"elementwise"} if kernel else set()
    return next((word for kind, word in words.items() if kind in kinds - silent), "")


def _oriented(shape: tuple[int, ...], use: Use) -> tuple[MatrixView, bool]:
    """Return the view that a product implies, and whether it says all of it.

    Args:
        shape: of the parameter.
        use: which of its axes the product sums over.
    """
    rank = len(shape)
    if rank == 2:
        transposed = use.inputs == (0,)
        if use.block and use.block != shape[0] and shape[0] % use.block == 0:
            sizes = (use.block,) * (shape[0] // use.block)
            return MatrixView(0, transposed, int(transposed), sizes, "blocks"), True
        return MatrixView(transposed=transposed), True
    into, out, batch = set(use.inputs), set(use.outputs), set(use.batch)
    if not batch and 0 in out and into == set(range(1, rank)):
        return MATRIX, True  # [out, in...]
    if not batch and into == {0}:
        return MatrixView(transposed=True), True  # [in, out...]
    for leading in range(max(batch, default=0) + 1, rank - 1):  # axes that count: layers, heads, experts
        first, *rest = (axis in into for axis in range(leading, rank))
        # What counts is no feature that a kernel's axes follow.
        plain = leading == len(batch) or len(rest) == 1
        if plain and first and not any(rest) and not into & set(range(leading)):
            return MatrixView(batch_dims=leading, transposed=True), True
        if not first and all(rest):
            return MatrixView(batch_dims=leading), True
    if batch and batch != set(range(len(batch))):
        return MatrixView(), False
    leading = max(len(batch), 1)
    swapped = leading in into and not into & set(range(leading + 1, rank))
    return MatrixView(batch_dims=leading, transposed=swapped), False


def _unread(shape: tuple[int, ...], why: str) -> RoleDecision:
    if len(shape) == 2:
        return doubted(matrix(f"two dimensions; it {why}"))
    return doubted(elementwise(f"a bare parameter that {why}"))
