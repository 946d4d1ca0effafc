"""What parameters are, from the autograd graph of a run: independent of everything that reads sources or operators.

A weight is contracted where a product of matrices, or a convolution, has it (or what was made of it and of other
weights alone) on one side and an activation on the other. A head is contracted by the last product before an output;
where that is a product of two activations that were divided by their lengths, so that directions are compared, by the
last ones before both.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

__all__ = ["OUTPUT_LIKE", "graph_roles"]

_PRODUCTS = {  # node of the graph: which of its inputs are factors; the others are added
    "Mm": (0, 1), "Bmm": (0, 1), "Mv": (0, 1), "Linear": (0, 1), "Addmm": (1, 2), "Baddbmm": (1, 2),
    "Addbmm": (1, 2), "Convolution": (0, 1), "MkldnnConvolution": (0, 1), "GroupedMm": (0, 1),
}  # fmt: skip
_LOOKUPS = ("Embedding", "EmbeddingBag", "Index", "IndexSelect", "Gather")
_NORMS = ("NativeLayerNorm", "NativeGroupNorm", "NativeBatchNorm", "CudnnBatchNorm", "FusedRmsNorm",
          "MiopenBatchNorm", "NativeDropout_")  # fmt: skip
_LENGTHS = ("LinalgVectorNorm", "Norm")
_REARRANGES = ("T", "Transpose", "Permute", "View", "UnsafeView", "ReshapeAlias", "Expand", "Clone", "ToCopy",
               "Unsqueeze")  # fmt: skip
OUTPUT_LIKE = (
    "hidden_state",
    "attention",
    "past_key",
    "cache",
    "loss",
    "pooler",
    "embeds",
    "state",
    "features",
)
"""Parts of the names of outputs that are no predictions."""


def graph_roles(model: nn.Module, outputs: Iterable[torch.Tensor]) -> dict[int, str]:
    """Return `matrix`, `output` or `table` (all that no product contracts) by identity of the parameter.

    What the graph does not reach, or uses in more than one way, is left out.

    Args:
        model: the model that made the outputs, its parameters requiring gradients.
        outputs: every output that is a prediction, then None, then all others.
    """
    walk = _Walk({id(param): tuple(param.shape) for param in model.parameters()})
    predictions, others, seen_end = [], [], False
    for tensor in outputs:
        if tensor is None:
            seen_end = True
        elif tensor.grad_fn is not None:
            (others if seen_end else predictions).append(tensor.grad_fn)
    for node in (*predictions, *others):
        walk.visit(node)
    heads = walk.heads(predictions)
    found: dict[int, str] = {}
    for key, kinds in walk.kinds.items():
        if kinds == {"contracted"}:
            found[key] = "output" if key in heads else "matrix"
        elif not kinds & {"contracted", "factor"}:
            found[key] = "table"
    return found


class _Walk:
    def __init__(self, shapes: dict[int, tuple[int, ...]]) -> None:
        self._shapes = shapes
        self._pure: dict[
            Any, frozenset[int] | None
        ] = {}  # the parameters that a node is made of; None: activations
        self.kinds: dict[int, set[str]] = {}
        self._contracted: dict[Any, frozenset[int]] = {}

    def visit(self, root: Any) -> None:
        """Fill `_pure` and `kinds` for everything under a node, without recursion."""
        stack = [(root, False)]
        while stack:
            node, ready = stack.pop()
            if node in self._pure:
                continue
            if ready:
                self._pure[node] = self._judge(node)
                continue
            stack.append((node, True))
            stack.extend((child, False) for child, _ in node.next_functions if child is not None)

    def _judge(self, node: Any) -> frozenset[int] | None:
        if hasattr(node, "variable"):
            key = id(node.variable)
            return frozenset({key}) if key in self._shapes else None
        name = _kind(node)
        children = [child for child, _ in node.next_functions]
        sides = [None if child is None else self._pure.get(child) for child in children]
        if name in _PRODUCTS:
            return self._product(node, children, sides, _PRODUCTS[name])
        if name in _LOOKUPS and sides and sides[0] is not None:
            self._note(sides[0], "table")
            return None
        given = [child for child in children if child is not None]
        flows = [child for child in given if self._pure.get(child) is None]
        made = frozenset[int]().union(*(side for side in sides if side is not None))
        if flows:
            self._note(made, "table")
            return None
        return made

    def _product(
        self, node: Any, children: list[Any], sides: list[frozenset[int] | None], factors: tuple[int, ...]
    ) -> frozenset[int] | None:
        for i, (child, side) in enumerate(zip(children, sides, strict=True)):
            if i not in factors and child is not None and side:
                self._note(side, "table")
        used = [i for i in factors if i < len(sides)]
        pure = [i for i in used if children[i] is not None and sides[i] is not None]
        flows = [i for i in used if children[i] is not None and sides[i] is None]
        if len(pure) == len(used):  # of parameters alone
            for i in pure:
                self._note(sides[i] or frozenset(), "factor")
            return None
        if pure and (flows or len(used) > len(pure)):  # an input without a gradient is an activation
            weights = frozenset[int]().union(*(sides[i] or frozenset() for i in pure))
            self._note(weights, "table" if self._is_depthwise(node, weights) else "contracted")
            self._contracted[node] = weights
        return None

    def _is_depthwise(self, node: Any, keys: Iterable[int]) -> bool:
        """True for a convolution that has a filter for every channel, and contracts none with another."""
        groups = getattr(node, "_saved_groups", 1)
        kernel = max((self._shapes[key] for key in keys), key=math.prod, default=())
        return groups > 1 and kernel[1:2] == (1,)

    def _note(self, keys: Iterable[int], kind: str) -> None:
        for key in keys:
            self.kinds.setdefault(key, set()).add(kind)

    def heads(self, roots: Iterable[Any]) -> set[int]:
        """Return what is contracted last before the outputs."""
        found: set[int] = set()
        stack, seen = list(roots), set[Any]()
        while stack:
            node = stack.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            if node in self._contracted:
                found |= self._contracted[node]
                continue
            first = node.next_functions[0][0] if node.next_functions else None
            table = _kind(node) in _LOOKUPS and self._pure.get(first) is not None
            mixes = _kind(node) in _PRODUCTS and not self._compares(node)
            if table or _kind(node) in _NORMS or mixes:
                continue
            stack.extend(child for child, _ in node.next_functions)
        return found

    def _compares(self, node: Any) -> bool:
        """True for a product of two activations that were both divided by their lengths."""
        factors = [node.next_functions[i][0] for i in _PRODUCTS[_kind(node)] if i < len(node.next_functions)]
        return all(child is not None and self._is_direction(child) for child in factors)

    def _is_direction(self, node: Any) -> bool:
        while node is not None and _kind(node) in _REARRANGES:
            node = node.next_functions[0][0] if node.next_functions else None
        if node is None or _kind(node) not in ("Div", "Mul"):
            return False
        beside = [child for child, _ in node.next_functions if child is not None]
        if _kind(node) == "Mul":  # by a temperature
            return any(map(self._is_direction, beside))
        return any(map(_is_length, beside))


def _is_length(node: Any) -> bool:
    """True for a norm, perhaps with a floor, an epsilon or another shape."""
    for _ in range(8):
        if node is None or "Norm" in _kind(node):
            break
        node = node.next_functions[0][0] if node.next_functions else None
    return node is not None and _kind(node) in _LENGTHS


def _kind(node: Any) -> str:
    return str(node.name()).partition("Backward")[0].removeprefix("torch::autograd::")
