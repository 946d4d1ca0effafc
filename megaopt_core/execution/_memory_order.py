"""Fused kernels go through memory as it lies: what belongs to one element has to lie at one place."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

__all__ = ["MemoryOrder"]


class MemoryOrder:
    """Brings gradients and states into the memory order of their tensors, where a kernel is fused.

    Such a kernel takes the n-th number in memory of a tensor, of its gradient and of its states for one element,
    whatever their strides say. They differ where a model is converted to another memory format after the build, where a
    weight is a transposed or strided view, and where a gradient is given. A tensor whose memory has holes is stepped in
    a copy.
    """

    def __init__(self) -> None:
        self._seen: list[tuple[int, ...]] = []

    @contextmanager
    def kept(self, inner: torch.optim.Optimizer) -> Iterator[None]:
        """Return a block in which what fused kernels step lies in one order.

        Args:
            inner: the optimizer that steps inside of it.
        """
        tensors = [tensor for group in inner.param_groups if group.get("fused") for tensor in group["params"]]
        swapped = self._settle(inner, tensors) if tensors else []
        try:
            yield
        finally:
            for tensor, memory in swapped:
                memory.copy_(tensor.data)
                tensor.data = memory

    @torch.no_grad()
    def _settle(
        self, inner: torch.optim.Optimizer, tensors: Sequence[torch.Tensor]
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        strides = list(map(torch.Tensor.stride, tensors))
        swapped = []
        if strides != self._seen:
            self._seen = strides
            swapped = [
                (tensor, tensor.data) for tensor in tensors if _is_plain(tensor) and _has_holes(tensor)
            ]
            for tensor, memory in swapped:
                self._seen = []  # look again before the next step
                tensor.data = memory.contiguous()
            for tensor in filter(_is_plain, tensors):
                state = inner.state.get(tensor, {})
                for key, value in state.items():
                    if isinstance(value, torch.Tensor) and value.shape == tensor.shape:
                        state[key] = _like(tensor, value)
        for tensor, _ in swapped:  # every other one has been lent a gradient of its own order
            if tensor.grad is not None:
                tensor.grad = _like(tensor, tensor.grad)
        return swapped


def _like(tensor: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Return values in the memory order of a tensor: themselves where that is theirs."""
    if _order(tensor) == _order(values) and not _has_holes(values):
        return values
    ordered = torch.empty_strided(tensor.shape, tensor.stride(), dtype=values.dtype, device=values.device)
    return ordered.copy_(values)


def _order(tensor: torch.Tensor) -> list[int]:
    """Return the strides of dimensions in which there is more than one element."""
    return [stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1]


def _has_holes(tensor: torch.Tensor) -> bool:
    """Return whether a tensor's elements do not lie side by side, each once."""
    return not (tensor.is_contiguous() or torch.ops.aten.is_non_overlapping_and_dense(tensor))


def _is_plain(tensor: torch.Tensor) -> bool:
    return type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout is torch.strided
