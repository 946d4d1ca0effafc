"""Tensors as bytes, without copies."""

from __future__ import annotations

import ctypes

import torch

__all__ = ["bytes_of"]


def bytes_of(tensor: torch.Tensor) -> memoryview:
    r"""Return the memory of a contiguous CPU tensor.

    Args:
        tensor: contiguous, on the CPU; any dtype.

    Example:
        >>> import torch
        >>> bytes(bytes_of(torch.tensor([1, 2], dtype=torch.int16)))
        b'\x01\x00\x02\x00'
    """
    size = tensor.numel() * tensor.element_size()
    if size == 0:
        return memoryview(b"")
    memory = (ctypes.c_char * size).from_address(tensor.data_ptr())
    memory.tensor = tensor  # type: ignore[attr-defined] # the memory lives as long as somebody looks at it
    return memoryview(memory).cast("B")
