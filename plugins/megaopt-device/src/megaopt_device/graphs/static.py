"""What a captured step reads and writes: gradients where they are put, states that stay where they are."""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any, override

import torch
from attrs import define, field
from torch.utils._python_dispatch import TorchDispatchMode

from megaopt_core.execution import InnerPart
from megaopt_device.graphs.held import tensors_in

__all__ = ["StaticStep", "is_lent"]


def is_lent(part: InnerPart) -> bool:
    """Return whether tensors have no memory of their own between steps.

    Args:
        part: what is stepped.
    """
    return any(0 in tensor.stride() and tensor.numel() > 1 for tensor in part.stepped)


class _Touched(TorchDispatchMode):
    """Remembers every tensor that operations are given: what a graph uses must not be freed before the graph.

    Not what the step makes itself: it lies in the graph's memory, in which what comes later takes the same place.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call] # torch's
        self.tensors: dict[int, torch.Tensor] = {}
        self._made: set[int | None] = set()

    @override
    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given: set[int | None] = {None}
        for tensor in tensors_in((args, kwargs or {})):
            address = _address(tensor)
            given.add(address)
            if address not in self._made:
                self.tensors.setdefault(id(tensor), tensor)
        result = func(*args, **(kwargs or {}))
        new = {_address(tensor) for tensor in tensors_in(result) if tensor.device.type != "cpu"}
        self._made |= new - given
        return result


def _address(tensor: torch.Tensor) -> int | None:
    """Return where a tensor's memory begins; None of one that consists of others."""
    try:
        return tensor.untyped_storage().data_ptr()
    except RuntimeError:
        return None


@define(eq=False)
class StaticStep:
    """A step on gradients in memory of its own, which leaves every state tensor where it was.

    Optimizers may put new tensors in the place of their states, and a precision policy does so that stores states in
    less: what is new is copied into what was there, as a part of the step.

    Args:
        part: what is stepped.
        indices: positions of the pieces that the groups hold.
        action: the step, with the memory that it needs.
    """

    part: InnerPart
    indices: Sequence[int]
    action: Callable[[], Any]
    grads: list[torch.Tensor] = field(init=False)
    """Where the step reads gradients."""
    touched: list[torch.Tensor] = field(factory=list, init=False)
    """What it uses."""

    def __attrs_post_init__(self) -> None:
        self.grads = [torch.empty_like(grad) for grad in self.present_grads()]

    def present_grads(self) -> list[torch.Tensor]:
        """Return the gradients that the policy would step with now; every piece has one."""
        found = [self.part.precision.grad(index) for index in self.indices]
        return [grad for grad in found if grad is not None]

    def __call__(self) -> None:
        """Make the step."""
        watching = _Touched()
        before = self._states()
        with watching:
            self.action()
            for state, kept in before:
                _put_back_in_place(state, kept)
        self.touched = list(watching.tensors.values())

    def attempt(self, capture: Callable[[Callable[[], Any]], Callable[[], None]]) -> Callable[[], None]:
        """Return what repeats the step, captured; where that fails, everything is as before.

        Args:
            capture: captures what is called.
        """
        states = self._states()
        data = [tensor.data for tensor in self._stepped()]
        settings = [{**group, "params": list(group["params"])} for group in self.part.inner.param_groups]
        restore_grads = self._with_static_grads()
        try:
            return capture(self)
        except BaseException:
            for state, kept in states:
                state.clear()
                state.update(kept)
            for tensor, memory in zip(self._stepped(), data, strict=True):
                tensor.data = memory
            for group, before in zip(self.part.inner.param_groups, settings, strict=True):
                group.update(before)
            raise
        finally:
            restore_grads()

    def copy_grads(self) -> None:
        """Bring the present gradients to where the step reads them, in one call."""
        pairs = [
            (target, grad)
            for target, grad in zip(self.grads, self.present_grads(), strict=True)
            if grad.data_ptr() != target.data_ptr()
        ]
        if pairs:
            torch._foreach_copy_([target for target, _ in pairs], [grad for _, grad in pairs])

    def _stepped(self) -> list[torch.Tensor]:
        return [self.part.stepped[index] for index in self.indices]

    def _states(self) -> list[tuple[MutableMapping[str, Any], dict[str, Any]]]:
        states = [self.part.inner.state.get(tensor) for tensor in self._stepped()]
        return [(state, dict(state)) for state in states if state]

    def _with_static_grads(self) -> Callable[[], None]:
        """Let the policy step with the static gradients; return what undoes that."""
        part, stepped = self.part, self._stepped()
        if not is_lent(part):
            own = [tensor.grad for tensor in stepped]
            _set_grads(stepped, self.grads)
            return lambda: _set_grads(stepped, own)
        # The policy makes gradients of what pieces collected; those of other pieces have been scaled since.
        collected = [piece.grad for piece in part.pieces]
        present = [part.precision.grad(index) for index in range(len(part.pieces))]
        static = dict(zip(self.indices, self.grads, strict=True))
        self._load([static.get(index, grad) for index, grad in enumerate(present)])

        def undo() -> None:
            _set_grads(stepped, [None] * len(stepped))
            self._load(present)
            for piece, grad in zip(part.pieces, collected, strict=True):
                piece.grad = grad

        return undo

    def _load(self, grads: Sequence[torch.Tensor | None]) -> None:
        for piece, grad in zip(self.part.pieces, grads, strict=True):
            piece.grad = grad
        self.part.precision.load_grads()


def _set_grads(tensors: Sequence[torch.Tensor], grads: Sequence[torch.Tensor | None]) -> None:
    for tensor, grad in zip(tensors, grads, strict=True):
        tensor.grad = grad


def _put_back_in_place(state: MutableMapping[str, Any], before: Mapping[str, Any]) -> None:
    for key, old in before.items():
        new = state.get(key)
        if isinstance(old, torch.Tensor) and isinstance(new, torch.Tensor) and new is not old:
            old.copy_(new)
            state[key] = old
