"""The mode that follows every tensor of a forward, operator by operator."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from attrs import evolve
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map_only

from megaopt_roles.watch._entries import by_entries, weights_by_entries
from megaopt_roles.watch._moves import MOVES, moved
from megaopt_roles.watch._notes import Notes, Use
from megaopt_roles.watch._op import Op
from megaopt_roles.watch._products import FACTORS, LOOKUPS, joined, lookup, product
from megaopt_roles.watch._values import NOTHING, Atom, Value, weighed

__all__ = ["CommunicationError", "Recorder"]

_EMPTY = frozenset(("zeros", "new_zeros", "zeros_like", "zero"))
_SAME_MEMORY = MOVES - {"glu", "native_dropout", "neg"}


class CommunicationError(RuntimeError):
    """The forward talks to other ranks, which do not run it now."""


class Recorder(TorchDispatchMode):
    """Follows every tensor of a forward, and notes what each parameter meets.

    Args:
        notes: where that is noted.
        on_meta: whether the parameters have no values; tensors that have some are then used without.
    """

    def __init__(self, notes: Notes, *, on_meta: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own
        self.notes, self._on_meta = notes, on_meta
        self._values: dict[int, Value] = {}
        self._kept: list[torch.Tensor] = []  # an identity is that of one tensor as long as it is kept
        self._writes: defaultdict[int, list[Value]] = defaultdict(list)
        self._now = 0

    def add_param(self, param: torch.Tensor, stand_in: torch.Tensor) -> None:
        """Follow a parameter.

        Args:
            param: the parameter.
            stand_in: what the forward gets in its place.
        """
        key = frozenset({id(param)})
        axes = tuple((Atom(id(param), dim, 1, n),) if n > 1 else () for dim, n in enumerate(stand_in.shape))
        self.put(stand_in, Value(weights=key, rows=key, axes=axes, made=True))

    def put(self, tensor: torch.Tensor, value: Value, root: int | None = None) -> Value:
        """Remember what is known of a tensor.

        Args:
            tensor: the tensor.
            value: what is known of it.
            root: when its memory was written; None: now.
        """
        self._now += 1
        value = evolve(value, at=self._now, root=root or self._now)
        self._values[id(tensor)] = value
        self._kept.append(tensor)
        return value

    def of(self, tensor: torch.Tensor) -> Value:
        """Return what is known of a tensor, with what was written to its memory since through another view.

        Args:
            tensor: the tensor.
        """
        value = self._values.get(id(tensor), NOTHING)
        if not self._writes:
            return value
        late = [written for written in self._writes.get(_memory(tensor), ()) if written.at > value.at]
        if not late:
            return value
        makers = [one.makers for one in (value, *late) if one.makers is not None]
        weights = value.weights.union(*(written.weights for written in late))
        if makers:
            self.notes.use(weights, Use.ENTRIES)
        merged = evolve(
            value,
            makers=frozenset().union(*makers) if makers else None,
            weights=frozenset() if makers else weights,
            made=value.made or any(written.made for written in late),
            sources=(value, *late),
            zero=False,
            parts=frozenset(),
            one_hot=late[-1].one_hot and value.zero,
        )
        return self.put(tensor, merged)

    def derive(self, outputs: Iterable[torch.Tensor], gradients: Iterable[torch.Tensor]) -> None:
        """Follow gradients, which come from what is differentiated.

        Args:
            outputs: what is differentiated.
            gradients: the derivatives.
        """
        value = joined(self.notes, [self.of(output) for output in outputs])
        for gradient in gradients:
            self.put(gradient, value)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operator, and note it."""
        if func.namespace in ("c10d", "_c10d_functional", "_c10d_functional_autograd"):
            raise CommunicationError(f"its forward communicates ({func})")
        given = [leaf for leaf in tree_iter((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        values = [self.of(tensor) for tensor in given]
        result = self._run(func, args, kwargs or {}, given)
        made = [leaf for leaf in tree_iter(result) if isinstance(leaf, torch.Tensor)]
        if not made:
            return result
        plain = func.overloadpacket.__name__
        plain = plain if plain.startswith("__") else plain.rstrip("_")
        if plain in _EMPTY:
            found: Value | list[Value] = Value(zero=True)
        elif (
            plain.endswith("_like")
            or plain == "new_empty"
            or not any(v.is_activation or v.weights or v.zero for v in values)
        ):
            return result
        else:
            if func.namespace not in ("aten", "prims"):
                for value in values:
                    self.notes.use(value.weights, Use.UNKNOWN)
            found = self._step(Op(self.notes, plain, args, list(zip(given, values, strict=True)), made))
        arguments = zip(args, func._schema.arguments, strict=False)
        written = {id(a) for a, said in arguments if said.alias_info is not None and said.alias_info.is_write}
        root = values[0].root if plain in _SAME_MEMORY and values and not written else None
        for index, tensor in enumerate(made):
            own = found[index] if isinstance(found, list) else found
            if own.is_activation and not (tensor.dtype.is_floating_point or tensor.dtype.is_complex):
                own = evolve(own, makers=frozenset(), axes=None)  # no gradient comes back
            own = self.put(tensor, own, root)
            if id(tensor) in written:
                self._writes[_memory(tensor)].append(own)
        return result

    def _run(self, func: Any, args: Any, kwargs: Any, given: Sequence[torch.Tensor]) -> Any:
        """Run an operator; where some tensors have no values, those of the others are left out."""
        if not self._on_meta or all(t.is_meta for t in given) or not any(t.is_meta for t in given):
            return func(*args, **kwargs)
        copies = {id(tensor): tensor if tensor.is_meta else tensor.to("meta") for tensor in given}
        back = {id(copies[id(tensor)]): tensor for tensor in given}
        args, kwargs = tree_map_only(torch.Tensor, lambda t: copies[id(t)], (args, kwargs))
        if "device" in kwargs:
            kwargs["device"] = torch.device("meta")
        return tree_map_only(torch.Tensor, lambda t: back.get(id(t), t), func(*args, **kwargs))

    def _step(self, op: Op) -> Value | list[Value]:
        """Return what is known of the results of an operator."""
        notes, name, values = self.notes, op.name, op.values
        if name in FACTORS and max(FACTORS[name]) < len(op.args):
            factors = [op.args[at] for at in FACTORS[name]]
            for tensor, value in op.given:
                if not any(tensor is factor for factor in factors):
                    notes.use(value.weights, Use.ENTRIES)
            return product(evolve(op, given=[(factor, self.of(factor)) for factor in factors]))
        if "attention" in name and not all(value.weights for value in values):
            for value in values[:3]:
                if value.weights:
                    notes.become_rows(value)
            factors = [pair for pair in op.given[:3] if not pair[1].weights]
            product(evolve(op, name="bmm", given=factors))
            return evolve(joined(notes, values, in_product=True), axes=weighed(op.result.shape))
        if name in LOOKUPS:
            return lookup(op)
        if name in MOVES and (values[0].weights or values[0].is_activation):
            return moved(op)
        return by_entries(op) if op.flows else weights_by_entries(op)


def _memory(tensor: torch.Tensor) -> int:
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return int(tensor.untyped_storage()._cdata)
