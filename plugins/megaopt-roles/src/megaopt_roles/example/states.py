"""What an example shows of parameters, and what is known of tensors on the way."""

from __future__ import annotations

import torch
from attrs import define, field

__all__ = ["Meeting", "State", "memory_of", "storage_of"]


@define
class Meeting:
    """How one parameter was used.

    Args:
        kinds: `contracted`, `indexed`, `looked_up`, `expanded`, `elementwise`, `depthwise`, `attending`,
            `factor` (of a product of parameters), `joint` (others made what was contracted, too),
            `masked` (multiplied with something fixed before), `sum` (with activations, of which a product was taken
            with others).
        widths: how many features the products with it return.
        transposed: for each product, whether it is stored `[in, out]`; None where that cannot be seen.
    """

    kinds: set[str] = field(factory=set)
    widths: set[int] = field(factory=set)
    transposed: set[bool | None] = field(factory=set)


@define
class State:
    """What is known about the memory of a tensor: the parameters that it is made of, or what flowed into it."""

    params: frozenset[int] = frozenset()
    right: frozenset[int] = frozenset()  # those of them that hold none of its rows: right-hand factors
    flow: frozenset[int] | None = None  # the last products on the way; None: no activation
    one_hot: bool = False  # what was given, compared with every row of a table
    soft: bool = False  # a softmax, which chooses among the rows of what it is multiplied with
    zero: bool = False  # what a recurrence begins with
    picked: bool = False  # rows that were picked by what was given
    factors: frozenset[int] = frozenset()  # the last products behind two that were multiplied, by entry
    terms: frozenset[int] = frozenset()  # parameters that were added since


def memory_of(tensor: torch.Tensor) -> int:
    """Return what tells the memory of a tensor, which its views share, from all other."""
    return int(storage_of(tensor)._cdata)


def storage_of(tensor: torch.Tensor) -> torch.UntypedStorage:
    """Return the memory of a tensor, also of one that a transform of torch.func has wrapped."""
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor.untyped_storage()
