"""Notes, operator by operator, which parameter meets which activation."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

import torch
from attrs import evolve
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from megaopt_roles.example.states import Meeting, State, memory_of, storage_of

__all__ = ["MOST_BYTES", "Meetings"]

MOST_BYTES: Final = 1 << 31
"""Of what a run with values makes, all of which is kept until its end."""

_FACTORS = {  # which arguments of an operator are the factors of its product
    **dict.fromkeys(
        ("mm", "bmm", "matmul", "linear", "mv", "_int_mm", "_scaled_mm", "_grouped_mm", "inner"), (0, 1)
    ),
    **dict.fromkeys(("addmm", "baddbmm", "addbmm", "addmv"), (1, 2)),
    **dict.fromkeys(("convolution", "_convolution", "convolution_overrideable"), (0, 1)),
    "_trilinear": (0, 1, 2),
}
_LOOKUPS = (
    "embedding",
    "index",
    "index_select",
    "gather",
    "_embedding_bag",
    "_embedding_bag_forward_only",
    "take",
)
_ZEROS = ("zeros", "new_zeros", "zeros_like")
_NORMS = ("native_layer_norm", "native_group_norm", "native_batch_norm", "_native_batch_norm_legit",
          "cudnn_batch_norm", "batch_norm", "_fused_rms_norm", "mul")  # fmt: skip


class Meetings(TorchDispatchMode):
    """Follows activations and weights by their memory, which the views of a tensor share.

    Attributes:
        by_param: the meetings of each parameter, by identity of the parameter.
        consumed: the parameters the output of whose product another parameter takes.
        ended: the parameters the output of whose product the model returns.
        compared: the parameters the output of whose product meets that of others in a product, as an equal: it may be
            what the model returns, or make the weights that do.
        hidden: the widths of what norms and gains scale, and of what tables return.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.by_param: dict[int, Meeting] = {}
        self.consumed: set[int] = set()
        self.ended: set[int] = set()
        self.compared: set[int] = set()
        self.hidden: set[int] = set()
        self._states: dict[int, State] = {}
        self._shapes: dict[int, torch.Tensor] = {}
        self._kept: list[Any] = []  # so that no memory is used twice
        self._bytes = 0  # of these

    def add_param(self, param: nn.Parameter, stand_in: torch.Tensor) -> None:
        """Note that a tensor stands in for a parameter."""
        self.by_param.setdefault(id(param), Meeting())
        self._shapes[id(param)] = stand_in
        self._set(stand_in, State(params=frozenset({id(param)})))

    def add_input(self, tensor: torch.Tensor) -> None:
        """Note that a tensor is an input of the model."""
        self._set(tensor, State(flow=frozenset()))

    def finish(self, outputs: Iterable[torch.Tensor]) -> None:
        """Note what the model returned."""
        for tensor in outputs:
            self.ended |= self._of(tensor).flow or frozenset()
        self._kept.clear()

    def derive(self, outputs: Iterable[torch.Tensor], gradients: Iterable[torch.Tensor]) -> None:
        """Note that gradients were taken of outputs: the products behind these are behind those."""
        flow = frozenset[int]().union(*(self._of(tensor).flow or frozenset() for tensor in outputs))
        for gradient in gradients:
            self._set(gradient, State(flow=flow))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operator, and note what met."""
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__.removesuffix("_") if hasattr(func, "overloadpacket") else ""
        given = [leaf for leaf in tree_iter((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        made = [leaf for leaf in tree_iter(result) if isinstance(leaf, torch.Tensor)]
        if name in _ZEROS and made:
            self._set(made[0], State(zero=True))
        elif given and made:
            self._note(name, args, given, made)
        return result

    def _note(
        self, name: str, args: Sequence[Any], given: list[torch.Tensor], made: list[torch.Tensor]
    ) -> None:
        factors = [args[i] for i in _FACTORS.get(name, ()) if i < len(args)]
        if factors:
            state = self._product(name, factors, args, made[0])
        elif name in _LOOKUPS:
            state = self._lookup(given)
        else:
            state = self._other(name, args, given, made)
        for tensor in made:
            if not tensor.dtype.is_floating_point and state.flow is not None:
                self._merge(tensor, State(flow=frozenset(), one_hot=state.one_hot))  # without a gradient
            else:
                self._merge(tensor, state)

    def _product(
        self, name: str, factors: list[torch.Tensor], args: Sequence[Any], made: torch.Tensor
    ) -> State:
        states = [self._of(factor) for factor in factors]
        weights = frozenset[int]().union(*(state.params for state in states))
        if weights and any(state.one_hot for state in states):
            right = frozenset[int]().union(*(state.right for state in states))
            return self._indexed(weights - right, made.shape[-1], right)
        if not any(state.flow is not None or state.zero for state in states):
            return self._factored(states)
        soft = [state.flow or frozenset() for state in states if state.soft]
        if weights and soft:  # learned keys, values, codes
            self._attend(weights.union(*soft))
        flow = frozenset[int]().union(*(state.flow or frozenset() for state in states))
        if not weights:
            if not soft:
                self.compared |= flow
            for key in frozenset[int]().union(*(state.terms for state in states)):
                self.by_param[key].kinds.add("sum")
            return State(flow=flow)
        depthwise = "conv" in name and len(args) > 8 and args[8] > 1 and args[8] == args[0].shape[1]
        self.consumed |= flow - weights
        for position, (factor, state) in enumerate(zip(factors, states, strict=True)):
            by_row = name == "linear" or position == 0  # its last axis is summed over
            for key in state.params:
                self._contract(key, factor, name, by_row=by_row, depthwise=depthwise)
                if len(state.params) > 1:
                    self.by_param[key].kinds.add("joint")
        return State(flow=weights)

    def _factored(self, states: Sequence[State]) -> State:
        """Return the product of parameters: its rows are those of the left-hand factor, which the right one makes."""
        left, *others = states
        right = frozenset[int]().union(*(state.params for state in others)) - left.params
        for key in left.params | right:
            self.by_param[key].kinds.add("factor")
        if not left.params:  # something fixed mixes the rows
            return State(right, right=frozenset[int]().union(*(state.right for state in others)))
        if right:
            self.consumed |= left.right
        return State(left.params | right, right=left.right | right)

    def _contract(self, key: int, factor: torch.Tensor, name: str, *, by_row: bool, depthwise: bool) -> None:
        meeting = self.by_param[key]
        meeting.kinds.add("depthwise" if depthwise else "contracted")
        if "conv" in name or factor.dim() < 2:
            if factor.dim() > 1:  # a row alone makes one feature of several
                meeting.widths.add(factor.shape[0])
            meeting.transposed.add(None)
            return
        meeting.widths.add(factor.shape[-2 if by_row else -1])
        whole = factor.numel() == self._shapes[key].numel()
        inner = factor.stride()[-1] == 1
        meeting.transposed.add(
            inner is not by_row if whole and factor.dim() == self._shapes[key].dim() else None
        )

    def _lookup(self, given: list[torch.Tensor]) -> State:
        table, *keys = given
        state, indexed = self._of(table), any(self._of(key).flow is not None for key in keys)
        if state.params and indexed and table.dim() == 2:
            return self._indexed(state.params - state.right, table.shape[1], state.right)
        for param in state.params - state.right:  # of a stack: what is left are matrices still
            self.by_param[param].kinds.add("looked_up")
        return State(state.params, state.right, state.flow, picked=indexed)

    def _indexed(self, tables: frozenset[int], width: int, made_by: frozenset[int] = frozenset()) -> State:
        """Note that tables are indexed with what was given; their rows are activations."""
        for param in tables:
            self.by_param[param].kinds.add("indexed")
        self.hidden.add(width)
        return State(flow=made_by, picked=True)

    def _attend(self, params: Iterable[int]) -> None:
        for key in params:
            self.by_param[key].kinds.add("attending")

    def _other(
        self, name: str, args: Sequence[Any], given: list[torch.Tensor], made: list[torch.Tensor]
    ) -> State:
        states = [self._of(tensor) for tensor in given]
        weights = frozenset[int]().union(*(state.params for state in states))
        flows = [state.flow for state in states if state.flow is not None]
        if name in ("expand", "repeat") and made[0].numel() > given[0].numel():
            for key in weights:
                self.by_param[key].kinds.add("expanded")
        if not flows:
            self._mask(name, given, states)
            holders = frozenset[int]().union(*(state.params - state.right for state in states))
            zero = not weights and all(state.zero for state in states)
            return State(weights, right=weights - holders, zero=zero)
        flow = frozenset[int]().union(*flows)
        if name == "_softmax":
            if args[1] not in (-1, given[0].dim() - 1):  # over positions: queries chose
                self._attend(flow)
            return State(flow=flow, soft=True)
        encodes = name in ("eq", "one_hot") and not given[0].dtype.is_floating_point
        if not weights and (encodes or (len(given) == 1 and states[0].one_hot)):
            return State(flow=flow, one_hot=True)
        if name == "add":
            self._add(flows, made[0])
        gains = [key for key in weights if self._shapes[key].numel() > 1]
        for key in gains:
            self.by_param[key].kinds.add("elementwise")
        if gains and name in _NORMS:
            self.consumed |= flow
            self.hidden.add(self._shapes[gains[0]].shape[-1])
        soft = not weights and all(state.soft for state in states if state.flow is not None)
        picked = all(state.picked for state in states)
        factors = frozenset[int]() if soft else self._compare(name, states, picked=picked)
        added = weights if name == "add" else frozenset[int]()
        terms = frozenset[int]().union(added, *(state.terms for state in states if added or len(given) == 1))
        return State(flow=flow, soft=soft, picked=picked, factors=factors, terms=terms)

    def _mask(self, name: str, given: Sequence[torch.Tensor], states: Sequence[State]) -> None:
        """Note weights that are multiplied with something fixed, as a mask, or edges of a graph."""
        pairs = zip(given, states, strict=True)
        if name == "mul" and any(tensor.numel() > 1 for tensor, state in pairs if not state.params):
            for key in frozenset[int]().union(*(state.params for state in states)):
                self.by_param[key].kinds.add("masked")

    def _add(self, flows: Sequence[frozenset[int]], made: torch.Tensor) -> None:
        """Note the widths of a stream and of what adds to it; sums of losses have none."""
        if len(flows) != 2 or flows[0] == flows[1] or not made.dim():
            return
        self.hidden.add(made.shape[-1])
        left, right = map(self._widths, flows)
        self.hidden |= left & right  # their features may lie in any axis

    def _widths(self, flow: Iterable[int]) -> set[int]:
        """Return how many features the last products on the way return."""
        return set[int]().union(*(self.by_param[key].widths for key in flow))

    def _compare(self, name: str, states: Sequence[State], *, picked: bool) -> frozenset[int]:
        """Note a sum over entries of a product of outputs; return the products behind two that are multiplied now.

        Those of one layer are no square or entropy where rows of it were picked.
        """
        if name in ("sum", "mean"):
            self.compared |= states[0].factors
        flows = [state.flow for state in states if state.flow]
        if name != "mul" or len(flows) != 2 or (flows[0] == flows[1] and not picked):
            return frozenset()
        return flows[0] | flows[1]

    def _of(self, tensor: torch.Tensor) -> State:
        return self._states.get(memory_of(tensor), State())

    def _set(self, tensor: torch.Tensor, state: State) -> None:
        key, storage = memory_of(tensor), storage_of(tensor)
        if key not in self._states and storage.device.type != "meta":
            self._bytes += storage.nbytes()
            if self._bytes > MOST_BYTES:
                raise MemoryError(f"it makes more than {MOST_BYTES} bytes; give a smaller batch")
        self._states[key] = state
        self._kept.append(storage)

    def _merge(self, tensor: torch.Tensor, state: State) -> None:
        """Add to what is known about the memory of a tensor: a view has that of its base, which may be written to."""
        old = self._states.get(memory_of(tensor))
        if old is not None:
            flows = [flow for flow in (old.flow, state.flow) if flow is not None]
            flow = frozenset[int]().union(*flows) if flows else None
            right = (old.right | state.right) - (old.params - old.right) - (state.params - state.right)
            state = evolve(state, params=old.params | state.params, right=right, flow=flow, zero=False)
        self._set(tensor, state)
